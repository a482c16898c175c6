"""One rank's part of a network: what each way to cut one gives to the step that trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from apportion.core.data.batch import Batch
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.replica.replica import Replica

MakePart = Callable[[nn.Module, Any], "Part"]


class Part(ABC):
    """One rank's part of a network, and how it is run."""

    model: nn.Module
    """Its parameters and buffers, under their plain names."""
    pieces: Mapping[str, TensorShard]
    """By plain name; a name that is missing: whole, held by every rank that has it, its gradient alike everywhere."""
    cuts: tuple[str, ...] | None = None
    """See ``Step``."""
    alike: ClassVar[bool] = False
    """Do all ranks compute the same outputs and the same loss? Then they draw the same random numbers, too."""

    @abstractmethod
    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        """Of a whole global batch: sets ``p.grad`` of its own parameters; the batch's mean loss (detached), None where
        only another rank knows it. What is not needed of the batch is not to be touched: it loads when it is."""

    @abstractmethod
    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        """Outputs of the whole batch in evaluation mode; None where another rank has them."""

    def close(self) -> None:  # noqa: B027 (nothing to let go of is the common case)
        """Let go of what it holds."""


class ReplicatedPart(Part):
    """Every rank calls ``model`` on the whole batch and computes the loss alike: its layers do the dividing."""

    alike = True

    def __init__(self, model: nn.Module, pieces: Mapping[str, TensorShard] | None = None) -> None:
        self.model, self.pieces = model, pieces or {}

    def backward(self, replica: Replica, batch: Batch) -> Tensor:
        with replica.autocast():
            loss = replica.loss(replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        return loss.detach()

    def predict(self, replica: Replica, batch: Batch) -> Any:
        return replica.predict(batch)
