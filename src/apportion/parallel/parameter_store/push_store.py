"""The store as a worker sees it, wherever its shards lie: in memory of the host, or on servers of other hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Contents:
    """Everything that a store holds at one moment."""

    data: list[Tensor]
    """Flat vectors: the weights, and each of the rule's slots."""
    counts: list[Array]
    """The number of updates behind each piece of a shard, one array a shard, where the rule keeps it."""
    touched: Array
    """Flags that say which parameters have had an update."""
    buffers: Tensor


class PushQueue(Protocol):
    """The records that a worker makes of its batches as it computes them."""

    def record_taken(self, ticket: int, /) -> None:
        """Write down that this worker has a batch."""

    def record_versions(self, pulled: Sequence[int] | None) -> None:
        """Write down the versions that the gradient of the batch taken last is computed on; None: on the weights that
        the batch before it left."""

    def wake_all(self) -> None:
        """Wake every process that waits, so that it looks again."""


class PushStore(ABC):
    """A store as a worker pushes to it and pulls from it, wherever its shards lie."""

    weights: Tensor
    """The weights that were pulled, as a flat vector."""
    gradient: Tensor
    """The gradient that the next push brings: flat, filled by the caller."""
    change: Tensor
    """The change of each buffer that the next push brings: flat, filled by the caller."""
    buffers: Tensor
    pulled: Sequence[int]
    """The version of each shard in ``weights``."""
    queue: PushQueue
    """The queue of batches."""

    @property
    @abstractmethod
    def waited(self) -> float:
        """The seconds spent waiting for the queue and for shards."""

    @property
    @abstractmethod
    def done(self) -> int:
        """The number of batches whose gradient is in the weights."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that the store takes on this host."""

    @abstractmethod
    def pull(self) -> None:
        """Copy the last version of every shard to where the worker computes."""

    @abstractmethod
    def push(self, hyper: Sequence[Sequence[float]], *, used: Sequence[bool] | None = None, pull: bool = True) -> float:
        """Update every shard with ``gradient``; returns the staleness."""

    @abstractmethod
    def put(self, contents: Contents, *, done: int, unpushed: Sequence[int] = ()) -> None:
        """Replace what the store holds, while no worker pushes. ``unpushed``: the batches that are handed out first."""
