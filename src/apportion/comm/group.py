"""The collectives of some ranks, whatever carries them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, final

import torch
from torch import Tensor


class Work(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the result is there. PeerLost where a rank is gone or the deadline has passed."""


class Group(ABC):
    """Ranks 0..size-1 that call the same collectives in the same order. The order of every reduction is fixed: the
    same inputs give the same bits, on every rank."""

    rank: int
    size: int
    waits: deque[tuple[float, float]]
    """(began, ended) of every blocking wait since someone last cleared the list, in time.perf_counter() seconds:
    comparable between the ranks of one host. The oldest are dropped."""
    waited: float
    """Seconds blocked in all."""
    waiting: Any = None
    """One word of memory that is 1 while this rank waits for others, for who watches from outside."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum in place over the ranks; the tensor (contiguous) is theirs until ``wait`` returns."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """(size, *shape): every rank's tensor of this one shape, in rank order. Blocks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """The source's tensor, in place, everywhere. Blocks."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank is here."""

    @abstractmethod
    def close(self) -> None:
        """Leave."""

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order, where dimension 0 may differ (and may be 0). Blocks."""
        rows = torch.tensor([tensor.shape[0]], dtype=torch.int64, device=tensor.device)
        counts = self.all_gather(rows).flatten().tolist()
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        if not padded.numel():  # nothing to send, and no way to view it as bytes and back
            return [padded[:count] for count in counts]
        # As bytes: no backend knows every type (bool, bfloat16, complex).
        gathered = self.all_gather(padded.view(torch.uint8)).view(tensor.dtype)
        return [part[:count] for part, count in zip(gathered.unbind(0), counts, strict=True)]


class _Done(Work):
    def wait(self) -> None:
        pass


@final
class Alone(Group):
    """A group of one: every collective is the identity."""

    def __init__(self) -> None:
        self.rank, self.size, self.waits, self.waited = 0, 1, deque(), 0.0

    def all_reduce(self, tensor: Tensor) -> Work:
        return DONE

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).clone()

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        pass

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


DONE = _Done()
"""A collective that has ended."""
