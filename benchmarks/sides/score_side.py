"""One rank that trains until a score, parked. python score_side.py FILE:NAME STRATEGY SEED

It answers with the accuracy on the evaluation set after so many steps more: the calls of a step that each rank makes.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from parked import serve, settle

from apportion import World, batches
from apportion.core.address import load_workload
from apportion.core.data.source import BatchSource
from apportion.core.value import parse
from apportion.runtime.worker.evaluation import evaluate


def main(address, strategy, seed):
    settle()
    workload, world = replace(load_workload(address), seed=int(seed)), World.from_env(device="cpu")
    step = parse(strategy, "apportion.strategies").build(workload, world)
    source = BatchSource.of_evaluation(workload, rank=world.rank)
    taken = batches(step)

    def run(steps):
        for batch in itertools.islice(taken, steps):
            step(batch)
        return evaluate(step, workload.evaluation, source, world.group(), lambda: None)["accuracy"]

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
