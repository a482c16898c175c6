"""The layout of tensors in memory that processes share: one after the other, each on cache lines of its own."""

from __future__ import annotations

import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from apportion.comm.sync import CACHE_LINE, round_up


class TensorRegion(NamedTuple):
    """The place of one tensor in a memory."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: memoryview | bytearray, begin: int = 0) -> Tensor:
        """Return the tensor in a memory whose layout begins at this byte. One without elements lies nowhere."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=begin + self.offset)
        return flat.view(self.shape)


@final
class TensorRegions:
    """A sequence of tensors in a memory. ``align``: the bytes on a multiple of which each begins."""

    def __init__(self, *, align: int = CACHE_LINE) -> None:
        self._align = align
        self.nbytes = 0

    def add(self, dtype: torch.dtype, *shape: int) -> TensorRegion:
        """Add the next tensor, and return its place."""
        region = TensorRegion(self.nbytes, dtype, shape)
        self.nbytes = round_up(self.nbytes + math.prod(shape) * dtype.itemsize, self._align)
        return region
