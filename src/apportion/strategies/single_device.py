"""single_device: the whole network in one process, with all its threads. The specification of every other strategy.

::

    batch -> [ forward, backward, update ] -> next batch

Price: ``t = loading + forward + backward + update`` of the whole batch.

Wins whenever the batch or the network is too small to be worth cutting: on one host's cores it is the rival to beat,
since threads share the weights and their caches for nothing. Loses when threads have too little work each (many small
layers, small matrices), or when there is more than one device.

``fused=True`` makes the same update by torch's fused kernels (SGD, Adam, AdamW and Adagrad have one), which read and
write every number once: the weights differ in the last bits from those of a loop that does not ask for it. It wins
where the network is mostly weights. Without it the step is, to the last bit, the loop that anyone would write.

A worker's death loses the steps since the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost, MemoryUse, of_replica
from apportion.cost_model.profile import Profile
from apportion.parallel.optim.fused import with_fused_updates
from apportion.parallel.replica.step import OneDeviceStep, reference

STEP_CALLS = 20.0
"""The time of a step's own Python, in ``Device.call_seconds``: chosen so that the measured step of a small network
comes out, where a call took 8 us."""


@final
@dataclass(frozen=True, repr=False)
class SingleDevice(Strategy):
    """One process computes the whole batch."""

    exact = True
    divides_batches = False
    one_process = True

    fused: bool = False
    """True for the same update by torch's fused kernel, where its optimizer has one: it differs in the last bits."""

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[SingleDevice]:
        if layout.ranks == 1:
            yield cls()
            if profile.element_wise:  # others have no fused kernel
                yield cls(fused=True)

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        _must_be_alone(layout.ranks)
        device, rows = layout.device(0), profile.batch_size
        return Cost(
            terms={
                "computing": profile.network_seconds(device, rows=rows, threads=layout.threads).both,
                "updating": profile.update_seconds(device, threads=layout.threads, fused=self.fused)
                + STEP_CALLS * device.call_seconds,
                "loading": profile.loading_seconds * rows,
            },
            memory=MemoryUse(own=of_replica(profile, rows)).a_worker(1),
            examples=rows,
        )

    def build(self, workload: Workload, world: World) -> Step:
        _must_be_alone(world.size)
        return OneDeviceStep(with_fused_updates(workload) if self.fused else workload, world.device, alone=True)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _must_be_alone(ranks: int) -> None:
    if ranks != 1:
        raise ValueError(f"single_device runs in one process, not in {ranks}: use workers=1, or data_parallel")
