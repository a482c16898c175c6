"""Tensors of several types that ranks add up at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from apportion.comm.group import Group, Work, collective


@final
class SumBuffers:
    """Buffers in which tensors of floating or complex numbers lie one after the other, one buffer for each type: what a
    collective costs, a sum of all of them costs once.

    ``like``: tensors of their shapes and types.
    """

    def __init__(self, like: Iterable[Tensor], device: torch.device) -> None:
        ends: Counter[torch.dtype] = Counter()
        places = []
        for tensor in like:
            places.append((tensor.dtype, ends[tensor.dtype], tensor.shape))
            ends[tensor.dtype] += tensor.numel()
        self._flat = {dtype: torch.zeros(end, dtype=dtype, device=device) for dtype, end in ends.items()}
        self.views = [self._flat[dtype][at : at + math.prod(shape)].view(shape) for dtype, at, shape in places]
        """The tensors, in the order in which they were given."""

    @collective
    def all_reduce(self, group: Group) -> list[Work]:
        """Begin to sum in place over the ranks; the tensors are the group's until every one of these has ended. Called
        by all ranks."""
        flat = [t for t in self._flat.values() if t.numel()]
        return [group.all_reduce(torch.view_as_real(t).view(-1) if t.is_complex() else t) for t in flat]
