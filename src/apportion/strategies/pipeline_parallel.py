"""pipeline_parallel: each worker has some consecutive layers; micro-batches follow each other through them.

Papers: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019;
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, and "Memory-Efficient
Pipeline-Parallel DNN Training", ICML 2021 (1F1B with a flush, which is the one here).

::

    gpipe                                          1f1b
    rank 0   F0 F1 F2 F3 .. .. B3 B2 B1 B0 U       F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 U
    rank 1   .. F0 F1 F2 F3 B3 B2 B1 B0 .. U       .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. U
    rank 2   .. .. F0 F1 F2 ...                    .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. U

Exact: gradients of the micro-batches are added up, each loss weighted by its share of the terms, and there is one
update a batch. Layers are divided so that the slowest stage is as fast as can be, by times measured once
(``parallel/pipeline/cut_points.py``); ``cuts`` names the layers that workers begin with.

Batch normalisation would see micro-batches, and is refused; with ``batch_norm="whole"`` a stage that has one puts the
micro-batches together, computes the batch at once, and hands it on in micro-batches
(``parallel/pipeline/whole_batch.py``).

Price, with m micro-batches and n stages: ``t = (m + n - 1) * (max t_stage(B / m) + messages) + max t_update``: the
share (n - 1) / (m + n - 1) of the time is waiting. Memory for each worker: its layers' weights, gradients and slots,
and the activations of m micro-batches (gpipe), or of n - stage at most (1f1b); with ``recompute`` of each only what
came in, for a second forward pass. A stage that computes the batch at once overlaps with no other: its ``t_stage(B)``
is added to the times of two shorter pipelines, before it and after it, and all stages keep m micro-batches.

Wins when the network fits no worker and its layers are alike: little goes over the wire, and only to the next rank.
Loses when one layer takes most of the time, or when micro-batches get too small to compute well.

A worker's death loses nothing on one host: every worker keeps its part in memory that outlives it, and the others and
its replacement go on from the last update. Elsewhere the run ends, and resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self, final

from torch import nn

from apportion.comm.world import World
from apportion.core.data.source import BatchSource
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.pipeline import Pipeline, cut
from apportion.parallel.batch_coupling.analysis import refuse_coupling
from apportion.parallel.optim.fused import with_fused_updates
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.pipeline.stage import refuse_stages, staged
from apportion.parallel.pipeline.staging import SCHEDULES, Staging, turns
from apportion.parallel.replica.step import reference

TRIED = (4, 8, 16, 32)
"""The numbers of micro-batches that are worth a price; more than one is what this strategy is for."""


@final
@dataclass(frozen=True, repr=False)
class PipelineParallel(Strategy):
    """Each worker computes some consecutive layers, of one micro-batch after the other."""

    exact = True
    splits = True
    survives = True

    stages: int | None = None
    """The number of stages, one a worker; None: as many as workers."""
    microbatches: int = 8
    """The number of parts of a batch that follow each other; a batch of fewer examples has as many parts as
    examples."""
    schedule: str = "1f1b"
    """The order of the passes: "gpipe", or "1f1b": the same result with fewer activations kept."""
    cuts: tuple[str, ...] | None = None
    """The layers that the workers after the first begin with, by their path; None: such that all take equally long."""
    recompute: bool = False
    """Compute the activations again in the backward pass, instead of keeping them: half as much again to compute."""
    batch_norm: str | None = None
    """The treatment of batch normalisation. "whole": a stage with it (or whatever else changes a buffer) waits for all
    micro-batches, and computes the batch at once. None: what would see micro-batches is refused."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f'schedule={self.schedule!r} must be "gpipe" or "1f1b"')
        self._must_be_whole("microbatches", "stages")
        if self.batch_norm not in (None, "whole"):
            raise ValueError(f'batch_norm={self.batch_norm!r} must be "whole", or None')

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        """Yields 1f1b, which keeps less, and gpipe where that is faster, as it hides what is under way between two
        stages. ``recompute`` is only for what does not fit without."""
        if layout.ranks == 1 or layout.ranks > len(profile.layers) or not profile.cut_by_rows:
            return
        for microbatches in TRIED:
            if microbatches <= profile.batch_size / 2 or microbatches == TRIED[0] <= profile.batch_size:
                found = cls(microbatches=microbatches, batch_norm="whole" if profile.batch_norm else None)
                yield found
                if not found.batch_norm:
                    yield from found._others(profile, layout)

    def _others(self, profile: Profile, layout: Placement) -> Iterator[Self]:
        gpipe = replace(self, schedule="gpipe")
        try:
            stages = self._stages(profile, layout)
            usual, other = self._in_turns(stages, layout), gpipe._in_turns(stages, layout)
        except ValueError:  # it is refused, whatever its schedule
            return
        if other.step_seconds < 0.99 * usual.step_seconds:
            yield gpipe
        if any(usual.memory_bytes * layout.together(r) > layout.device(r).memory_bytes for r in layout.kinds):
            yield replace(self, recompute=True)

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        return self._in_turns(self._stages(profile, layout), layout)

    def _in_turns(self, stages: Pipeline, layout: Placement) -> Cost:
        """Returns the cost of the stages, in this strategy's schedule; where one waits for the whole batch there is one
        schedule only."""
        schedule = "gpipe" if stages.waits else self.schedule
        orders = [turns(schedule, stage, layout.ranks, stages.microbatches) for stage in range(layout.ranks)]
        return stages.cost(orders)

    def _stages(self, profile: Profile, layout: Placement) -> Pipeline:
        """Returns the stages, for any schedule. Raises ValueError where they cannot be."""
        self._refuse(layout.ranks, not profile.cut_by_rows, profile.own_update, profile.carries)
        if layout.ranks > 1:
            refuse_stages(profile.own_update, profile.carries, layout.device(0).kind, profile.untraceable)
        microbatches = min(self.microbatches, profile.batch_size)
        normalises = [layer.kind for layer in profile.layers if "BatchNorm" in layer.kind]
        if profile.batch_norm and (microbatches > 1 or self.recompute) and self.batch_norm is None:
            what = f"microbatches={self.microbatches}" if microbatches > 1 else "recompute=True"
            name = normalises[0] if normalises else "a normalisation"
            raise ValueError(
                f"{what} would give {name} the statistics of a part of the batch: use "
                'batch_norm="whole", microbatches=1, layer_placement, data_parallel, or a normalisation that looks at '
                "one example (GroupNorm, LayerNorm)"
            )
        begins = cut(profile, layout, microbatches=microbatches, cuts=self.cuts)
        bounds = pairwise([*begins, len(profile.layers)])
        at_once = [any("BatchNorm" in layer.kind for layer in profile.layers[a:b]) for a, b in bounds]
        if profile.batch_norm and not any(at_once):  # one that is made of functions may be anywhere
            at_once = [True] * layout.ranks
        at_once = [each and microbatches > 1 for each in at_once]
        return Pipeline(
            profile, layout, begins,
            microbatches=microbatches, recompute=self.recompute, at_once=at_once, fused=True,
        )  # fmt: skip

    def _refuse(self, ranks: int, couples: bool, own_update: bool, carries: bool) -> None:
        if self.stages not in (None, ranks):
            raise ValueError(
                f"stages={self.stages} needs as many workers, and there are {ranks}: use workers={self.stages}, "
                "or leave stages= out"
            )
        if self.microbatches > 1 and couples:
            raise ValueError(
                f"microbatches={self.microbatches} would cut the batch under a loss that couples examples: "
                "use microbatches=1, or layer_placement"
            )
        if self.microbatches > 1 and ranks == 1 and (own_update or carries):
            what = "update=" if own_update else "a recurrent state that is carried"
            raise ValueError(
                f"microbatches={self.microbatches} would cut the batch under {what}: use microbatches=1, or "
                "data_parallel"
            )

    def build(self, workload: Workload, world: World) -> Step:
        self._refuse(world.size, workload.count is None, workload.update is not None, workload.carry is not None)

        def part(now: World) -> MakePart:
            # Of fewer workers there are fewer stages: what was said of the others does not fit them.
            cuts = self.cuts if now.size == world.size else None
            staging = Staging(
                microbatches=self.microbatches,
                schedule=self.schedule,
                cuts=cuts,
                recompute=self.recompute,
                whole_batch_norm=self.batch_norm == "whole",
            )
            return staged(workload, now, staging)

        def look(model: nn.Module, source: BatchSource) -> None:
            """Refuses what couples rows: layers that a stage computes of the whole batch are not divided; others and
            the loss are."""
            if self.microbatches > 1 and self.batch_norm is None:
                refuse_coupling(model, workload, source.sample, strategy=str(self))

        return SplitStep(with_fused_updates(workload), world, part(world), again=part, look=look)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)
