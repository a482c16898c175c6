"""The loop of a plain example, parked. python plain.py digits|cifar10"""

import sys
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from parked import serve, settle  # noqa: E402

STEPS = 10**9


def digits():
    import digits_plain

    x_train, _, y_train, _ = digits_plain.digits()
    return digits_plain, (x_train, y_train)


def cifar10():
    import cifar10_plain

    return cifar10_plain, cifar10_plain.training_set()


def main(name):
    settle()
    example, tensors = {"digits": digits, "cifar10": cifar10}[name]()
    parts = example.training(STEPS)
    data = example.batches(*tensors)
    serve(lambda steps: example.train(*parts, islice(data, steps)))


if __name__ == "__main__":
    main(*sys.argv[1:])
