"""top_k: only the largest gradients travel between hosts, each with its place.

Papers: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Lin, Han, Mao, Wang and
Dally, "Deep Gradient Compression", ICLR 2018. What stays behind is added to the next step's gradient (error feedback).

A gradient that is sent needs twice its bytes, so that a fraction of 0.01 sends a fiftieth. Every host sends its own to
all others, whose places differ: with many hosts there is less to win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from apportion.comm.network.host_exchange import HostSum
from apportion.parallel.compression.coded_sum import Codec, CodedSum
from apportion.parallel.compression.compression import Compression


@final
@dataclass(frozen=True, repr=False)
class TopK(Compression):
    """The largest gradients of each message."""

    keeps_errors = True
    passes = 44.0

    fraction: float = 0.01
    """The part of the gradients that is sent: above 0, at most 1."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction={self.fraction!r} must be above 0 and at most 1: 0.01 sends one in a hundred")

    def between(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> HostSum:
        return CodedSum(_Largest(self.fraction), dtype, keeps_errors=True)

    def sent(self, numel: int, itemsize: int) -> float:
        return 2.0 * itemsize * numel * self.fraction


@final
class _Largest(Codec):
    """The code: the places of the largest numbers, and then the numbers."""

    has_own_places = True

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def nbytes(self, numel: int, itemsize: int) -> int:
        return 2 * itemsize * self._count(numel)

    def _count(self, numel: int) -> int:
        return max(1, round(numel * self._fraction))

    def encode(self, numbers: Tensor, code: Tensor) -> None:
        places, values = self._parts(numbers, code)
        found = numbers.abs().topk(len(places), sorted=False).indices
        places.copy_(found)
        torch.index_select(numbers, 0, found, out=values)

    def add(self, code: Tensor, numbers: Tensor, *, times: float = 1.0) -> None:
        places, values = self._parts(numbers, code)
        numbers.index_add_(0, places, values, alpha=times)

    def _parts(self, numbers: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        half = numbers.element_size() * self._count(numbers.numel())
        places = code[:half].view(torch.int32 if numbers.element_size() == 4 else torch.int64)
        return places, code[half : 2 * half].view(numbers.dtype)
