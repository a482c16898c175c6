"""The settings of a pipeline, the order in which a stage computes its micro-batches, and the base class of a stage.

``Staging`` says how a network is divided into stages and a batch into micro-batches, and refuses what that would
change. ``turns`` is the schedule: a pure function that lists the passes of one stage. ``StagePart`` makes these passes,
and predicts; its subclasses run a stage of a traced graph (``stage.py``) or of the network's own forward
(``eager_stages.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.modes import evaluating
from apportion.parallel.ops.factored_linear import Products
from apportion.parallel.partition.part import Part
from apportion.parallel.pipeline.microbatch import MicrobatchPasses, StageLinks
from apportion.parallel.pipeline.whole_batch import normalises
from apportion.parallel.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The way in which a network is divided into stages, and a batch into micro-batches."""

    microbatches: int = 1
    schedule: str = "gpipe"
    cuts: Sequence[str] | None = None
    """The layers that the stages after the first begin with; None: where stages take equally long."""
    recompute: bool = False
    """True where activations are computed again in the backward pass."""
    whole_batch_norm: bool = False
    """True where a stage with batch normalisation computes the batch at once."""

    def refuse_state(self, model: nn.Module, stateful: Sequence[str]) -> None:
        """Refuse layers and buffers of which a forward pass over parts of the batch, or a second one, would make
        another network."""
        microbatches = self.microbatches
        if self.whole_batch_norm:
            if not self.recompute:
                return
            microbatches = 1
        what, why, instead = "recompute=True", "have {} see every batch twice", "recompute=False"
        if microbatches > 1:
            what, why = f"microbatches={microbatches}", "give {} the statistics of a part of the batch"
            instead = 'batch_norm="whole", microbatches=1'
        for name, layer in model.named_modules():
            if normalises(layer):
                raise ValueError(
                    f"{what} would {why.format(name)}: use {instead}, layer_placement, data_parallel, or a "
                    "normalisation that looks at one example (GroupNorm, LayerNorm)"
                )
        if stateful:
            raise ValueError(
                f"{what} would change the buffer {stateful[0]} more than once a step: use {instead}, layer_placement, "
                "or data_parallel"
            )


# The order in which a stage computes its micro-batches: pure decisions.
#
# ::
#
#     gpipe, 3 stages, 4 micro-batches           1f1b
#     stage 0  F0 F1 F2 F3 .. .. B3 B2 B1 B0     F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
#     stage 1  .. F0 F1 F2 F3 B3 B2 B1 B0 ..     .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
#     stage 2  .. .. F0 F1 F2 F3 ...             .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
#
# Both compute the same gradients. gpipe keeps the activations of all micro-batches until the first backward pass; 1f1b
# those of as many as there are stages from this one to the last.

Turn = tuple[Literal["forward", "backward"], int]
SCHEDULES = ("gpipe", "1f1b")


def turns(schedule: str, stage: int, stages: int, microbatches: int) -> list[Turn]:
    """The passes that a stage makes, in order: which pass of which micro-batch."""
    if schedule == "gpipe":
        forward: list[Turn] = [("forward", m) for m in range(microbatches)]
        return [*forward, *(("backward", m) for m in reversed(range(microbatches)))]
    before = min(stages - stage - 1, microbatches)
    order: list[Turn] = [("forward", m) for m in range(before)]
    for m in range(microbatches - before):
        order += [("forward", m + before), ("backward", m)]
    return [*order, *(("backward", m) for m in range(microbatches - before, microbatches))]


class StagePart(Part):
    """This rank's stage of a network, and how micro-batches pass through it."""

    ends: StageLinks
    _products: Products
    _trained: Sequence[nn.Module]
    """The modules that are in training mode."""

    def __init__(self, world: World, staging: Staging) -> None:
        self._rank, self._size, self._staging = world.rank, world.size, staging
        self._schedule = staging.schedule
        self.most_in_flight = 0
        """The most micro-batches whose activations this stage has kept at once."""

    @abstractmethod
    def run(self, received: Sequence[Any], batch: Batch) -> Any:
        """Run the stage's forward pass; returns what it hands on, or the outputs of the network."""

    @abstractmethod
    def evaluated(self, received: Sequence[Any], batch: Batch) -> Any:
        """Run the stage's forward pass of the network as it is evaluated."""

    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        parts = batch.parts(self._staging.microbatches)
        passes = MicrobatchPasses(self.run, self._products, self.ends, replica, batch, parts)
        self._make(passes, len(parts))
        self.most_in_flight = max(self.most_in_flight, passes.most)
        self.ends.finish()
        return passes.loss

    def _make(self, passes: MicrobatchPasses, count: int) -> None:
        """Make the passes of ``count`` micro-batches."""
        for kind, number in turns(self._schedule, self._rank, self._size, count):
            if kind == "forward":
                passes.forward(number)
            else:
                passes.backward(number)

    @torch.no_grad()
    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        received = self.ends.before.receive() if self.ends.before is not None else []
        with evaluating(self._trained), replica.autocast():
            found = self.evaluated(received, batch)
        if self.ends.after is None:
            return found
        self.ends.after.send(found)
        self.ends.after.finish()
        return None

    def close(self) -> None:
        self.ends.close()
