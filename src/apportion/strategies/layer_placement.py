"""layer_placement: each worker has some consecutive layers; a batch goes through them one worker after the other.

Papers: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (DistBelief's model parallelism); Sutskever,
Vinyals and Le, "Sequence to Sequence Learning with Neural Networks", NIPS 2014 (a layer of an LSTM on each GPU).

::

    rank 0   F . . . . B          forward of its layers, on the whole batch; then it waits
    rank 1   . F . . B .
    rank 2   . . F B . .          loss, backward

Exact: every layer sees the whole batch, also batch normalisation and losses that couple examples. Layers are divided
so that each worker's take as long as another's, measured once; ``cuts`` names the layers that workers begin with.

Price: ``t = t_compute(B) + 2 (n - 1) * (bytes(activations at a cut) / bandwidth + latency) + max t_update``: only one
worker computes at a time. Memory for each worker: its layers' weights, gradients, slots and activations.

Wins when the network fits no worker, and micro-batches are not to be had (batch normalisation). Loses otherwise:
pipeline_parallel keeps the same workers busy, and n workers here are never faster than one.

A worker's death loses nothing on one host: every worker keeps its part in memory that outlives it, and the others and
its replacement go on from the last update. Elsewhere the run ends, and resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, final

from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.pipeline import Pipeline, cut
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.pipeline.stage import refuse_stages, staged
from apportion.parallel.pipeline.staging import Staging, turns
from apportion.parallel.replica.step import reference


@final
@dataclass(frozen=True, repr=False)
class LayerPlacement(Strategy):
    """Each worker computes some consecutive layers, one worker after the other."""

    exact = True
    divides_batches = False
    splits = True
    survives = True

    cuts: tuple[str, ...] | None = None
    """The layers that the workers after the first begin with, by their path; None: such that all take equally long."""

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        if 1 < layout.ranks <= len(profile.layers):
            yield cls()

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        if layout.ranks > 1:
            refuse_stages(profile.own_update, profile.carries, layout.device(0).kind, profile.untraceable)
        begins = cut(profile, layout, microbatches=1, cuts=self.cuts)
        orders = [turns("gpipe", stage, layout.ranks, 1) for stage in range(layout.ranks)]
        return Pipeline(profile, layout, begins, microbatches=1).cost(orders)

    def build(self, workload: Workload, world: World) -> Step:
        def part(world: World) -> MakePart:
            return staged(workload, world, Staging(cuts=self.cuts))

        return SplitStep(workload, world, part(world), again=part)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)
