"""tensor_parallel: every layer is sliced over the ranks, and every rank works on the whole batch.

Papers: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019
(pairs, heads, the vocabulary); Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (a network partitioned
over machines).

::

                 Linear by columns     f(.)     Linear by rows
    rank 0   x --- units 0..H/2 --- element-wise --- term \\
                                                            sum --- y, on both
    rank 1   x --- units H/2..H --- element-wise --- term /

Exact: a slice computes what the whole layer would of its units. Attention is cut by heads, an embedding and the output
layer by vocabulary (cross-entropy then needs three numbers an example instead of the logits), a recurrent layer by
hidden units. What is not sliced (normalisation, narrow layers, whatever the network does by itself) is computed by
every rank alike.

Price, for layers of w weights, of which a pair has I inputs and O outputs: ``t = t_compute(B) / n + t_update / n +
B (I + O) * 4 bytes / bandwidth + 2 messages`` a pair; the first layer sends nothing back. No gradient is exchanged.
Memory for each rank: ``(weights + gradient + slots) / n``, and whole activations between the slices.

Wins over data_parallel where the weights are many and the batch is small: what is sent grows with the batch, not with
the weights. Loses on convolutions, on large batches, between hosts (two messages a pair), and on recurrent layers,
whose ranks meet at every time step.

A worker's death loses nothing on one host: every worker keeps its slices in memory that outlives it, and the others and
its replacement go on from the last update. Elsewhere the run ends, and resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

from torch import nn

from apportion.comm.group import Group
from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import chance, held, times, worst
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies import tensor
from apportion.parallel.optim.fused import with_fused_updates
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.replica.step import reference
from apportion.parallel.tensor.sharding_plan import ShardingPlan, TensorParallelModel, plan

OWN_UPDATE = (
    "update= calls the network as it likes, which shows only as it runs, and slices are found before: use loss=, or "
    "data_parallel"
)


@final
@dataclass(frozen=True, repr=False)
class TensorParallel(Strategy):
    """Each worker holds a slice of every layer and computes it for every example."""

    exact = True
    divides_batches = False
    splits = True
    survives = True

    min_width: int = 32
    """A Linear or an embedding that is not part of a pair is sliced where both its sides are at least this wide: what
    is narrower costs more to gather than to compute."""

    def __post_init__(self) -> None:
        self._must_be_whole("min_width")

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        if layout.ranks > 1 and tensor.sliced(profile, min_width=1):
            yield cls()

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        if profile.own_update:
            raise ValueError(OWN_UPDATE)
        how = tensor.sliced(profile, min_width=self.min_width)
        if not how:
            kinds = dict.fromkeys(layer.kind for layer in profile.layers if layer.parameter_bytes)
            raise ValueError(_nothing(list(kinds)))
        each, rows = list(dict.fromkeys(times(profile, layout))), profile.batch_size
        ranks = [tensor.Slices(profile, layout, own, how).price(profile.layers, rows=rows) for own in each]
        slowest = max(ranks, key=lambda rank: rank.computing)
        mean = sum(rank.computing for rank in ranks) / len(ranks)
        update = max(own.update(slowest.weights, fused=True) for own in each)
        return Cost(
            terms={
                "computing": mean,
                "communicating": slowest.communicating,
                "updating": update,
                "waiting": slowest.computing * (1.0 + chance(layout)) - mean,
                "loading": profile.loading_seconds * rows,
            },
            memory=worst(held(profile, layout, r.weights, r.activations, share=1.0) for r in ranks),
            examples=rows,
        )

    def build(self, workload: Workload, world: World) -> Step:
        if workload.update is not None:
            raise ValueError(OWN_UPDATE)

        def part(world: World) -> MakePart:
            return lambda model, inputs: self._part(workload, world.group(), model, inputs)

        return SplitStep(with_fused_updates(workload), world, part(world), again=part)

    def _part(self, workload: Workload, group: Group, model: nn.Module, inputs: Any) -> TensorParallelModel:
        found = ShardingPlan()
        for width in (self.min_width, 1):  # a network of narrow layers alone is sliced all the same
            if not found.layers():
                found = plan(model, inputs, workload, min_width=width)
        if not found.layers():
            kinds = dict.fromkeys(
                type(m).__name__ for m in model.modules() if next(m.parameters(recurse=False), None) is not None
            )
            raise ValueError(_nothing(list(kinds)))
        return TensorParallelModel(model, found, group, workload)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _nothing(kinds: Sequence[str]) -> str:
    return (
        f"tensor_parallel finds no layer that it can slice (there are {', '.join(kinds) or 'none with weights'}): it "
        "slices Linear, Embedding, MultiheadAttention, LSTM, GRU and RNN layers whose weights nothing else uses; use "
        "data_parallel, or conv_parallel for convolutions"
    )
