"""One rank's part of a network, in the form that each way to cut one gives it to the step that trains it."""

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
    """The module with this rank's parameters and buffers, under their plain names."""
    pieces: Mapping[str, TensorShard]
    """The piece that this rank holds of each tensor, by plain name. A tensor whose name is missing is whole, and every
    rank that has it holds all of it, with equal gradients."""
    cuts: tuple[str, ...] | None = None
    """The names of the layers that stages begin with, or None; see ``Step``."""
    alike: ClassVar[bool] = False
    """Tells whether all ranks compute the same outputs and the same loss. Then they draw the same random numbers,
    too."""

    @abstractmethod
    def backward(self, replica: Replica, batch: Batch) -> Tensor | None:
        """Run the backward pass of a whole global batch: sets ``p.grad`` of this part's own parameters. Returns the
        batch's mean loss (detached), None where only another rank knows it. An unneeded part of the batch must not be
        touched: it loads when it is."""

    @abstractmethod
    def predict(self, replica: Replica, batch: Batch) -> Any | None:
        """Return the outputs of the whole batch in evaluation mode; None where another rank has them."""

    def close(self) -> None:  # noqa: B027 (nothing to let go of is the common case)
        """Release the resources that the part holds."""


class ReplicatedPart(Part):
    """A part whose layers do the dividing: every rank calls ``model`` on the whole batch and computes the same loss."""

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
