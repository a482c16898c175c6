"""One stage of several, whatever it computes its part of the network with: micro-batches pass through it in the turns
of a schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.modes import evaluating
from apportion.parallel.ops.factored_linear import Products
from apportion.parallel.partition.part import Part
from apportion.parallel.pipeline.microbatch import MicrobatchPasses, StageLinks
from apportion.parallel.pipeline.schedules import turns
from apportion.parallel.pipeline.staging import Staging
from apportion.parallel.replica.replica import Replica


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

    def _make(self, passes: MicrobatchPasses, many: int) -> None:
        """Make the passes of so many micro-batches."""
        for kind, number in turns(self._schedule, self._rank, self._size, many):
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
