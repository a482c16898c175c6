"""apportion's side of a comparison: one rank, parked. python ours.py FILE:NAME STRATEGY [BATCH_SIZE]"""

import sys

from endless import endless
from parked import serve, settle

from apportion import World, batches
from apportion.values import parse


def main(address, strategy, batch_size=None):
    settle()
    workload = endless(address, batch_size)
    step = parse(strategy, "apportion.strategies").build(workload, World.from_env(device="cpu"))

    def run(steps):
        for batch in batches(step, stop=step.done + steps):
            step(batch)

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
