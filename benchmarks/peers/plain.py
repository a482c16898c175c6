"""The loop of a plain example, parked. python plain.py digits|cifar10"""

import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from parked import serve, settle

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
