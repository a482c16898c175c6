"""One rank of a strategy of apportion's, parked: answers with bytes of its tensors, at their peak, above what there was
when all had been imported. python tensor_bytes.py FILE:NAME STRATEGY [BATCH_SIZE]

0 asks for the peak of the build, any other number for the peak of so many steps: weights, gradients, slots,
activations, batches, messages and what operations take for themselves, whatever torch's allocator gives and takes back.
"""

import gc
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import endless
from parked import serve, settle
from torch.autograd.profiler import profile

from apportion import World, batches
from apportion.core.value import parse


class Meter:
    """Bytes now, and the most that there have been since it was last asked."""

    def __init__(self):
        self.now = 0

    def peak(self, work):
        """While this works."""
        gc.collect()
        with profile(profile_memory=True) as profiled:
            made = work()
        events = sorted((e for e in profiled.kineto_results.events() if e.name() == "[memory]"), key=_when)
        levels = list(itertools.accumulate((e.nbytes() for e in events), initial=self.now))
        self.now = levels[-1]
        return max(levels), made


def _when(event):
    return event.start_ns()


def main(address, strategy, batch_size=None):
    settle()
    workload, world, meter = endless(address, batch_size), World.from_env(device="cpu"), Meter()
    built, step = meter.peak(lambda: parse(strategy, "apportion.strategies").build(workload, world))

    def run(steps):
        for batch in batches(step, stop=step.done + steps):
            step(batch)

    serve(lambda steps: meter.peak(lambda: run(steps))[0] if steps else built)


if __name__ == "__main__":
    main(*sys.argv[1:])
