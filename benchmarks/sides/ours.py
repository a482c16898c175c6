"""apportion's side of a comparison: one rank, parked. python ours.py FILE:NAME STRATEGY [BATCH_SIZE [OPTION ...]]

memory: its batches lie in memory already. slowed: rank 1 computes three times as long. one_version: the weights lie in
the shared pages once, and a worker that dies in an update takes them with it. waiting: answers with the share of the
time in which it waits for other ranks.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import endless, in_memory
from parked import serve, settle

from apportion import World, batches
from apportion.core.value import parse
from apportion.parallel.shared_weights import layout
from apportion.process import keep_what_is_freed


def slowed(step):
    """The same step; its share takes three times as long."""
    backward = step.backward

    def slow(batch):
        start = time.perf_counter()
        loss = backward(batch)
        time.sleep(2 * (time.perf_counter() - start))
        return loss

    step.backward = slow


def main(address, strategy, batch_size=None, *options):
    settle()
    keep_what_is_freed()  # as its workers do
    if "one_version" in options:
        layout.VERSIONS = 1
    workload, world = endless(address, batch_size), World.from_env(device="cpu")
    step = parse(strategy, "apportion.strategies").build(workload, world)
    if "slowed" in options and world.rank == 1:
        slowed(step)
    kept = in_memory(step.source, step.data_shard) if "memory" in options else None

    def run(steps):
        if kept is None:
            for batch in batches(step, stop=step.done + steps):
                step(batch)
            return
        for number in range(steps):
            step(kept[number % len(kept)])

    def waiting(steps):
        start, waited = time.perf_counter(), step.spent()["waiting"]
        run(steps)
        return (step.spent()["waiting"] - waited) / (time.perf_counter() - start)

    serve(waiting if "waiting" in options else run)


if __name__ == "__main__":
    main(*sys.argv[1:])
