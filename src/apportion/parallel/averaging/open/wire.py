"""The bytes of a contribution, and of an average, as they travel between replicas."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from apportion.comm.shared_layout import TensorRegions
from apportion.parallel.averaging.contribution import Contribution


@final
class ContributionBytes:
    """The layout of the tensors of contributions in memory that is sent: weights and counts, with ``slots`` the
    optimizer's slots and their flags, and with ``momentum`` the outer optimizer's. ``like``: one of their shapes and
    types."""

    def __init__(self, like: Contribution, *, slots: bool, momentum: bool = False) -> None:
        self._slots = slots
        regions = TensorRegions()
        self._weights = [regions.add(t.dtype, *t.shape) for t in like.weights]
        self._counts = [regions.add(t.dtype, *t.shape) for t in like.counts]
        self._rest = [regions.add(t.dtype, *t.shape) for t in (*like.slots, like.has)] if slots else []
        self._momentum = [regions.add(t.dtype, *t.shape) for t in like.momentum] if momentum else []
        self.nbytes = regions.nbytes

    def write(self, parts: Contribution) -> bytearray:
        """Return new memory with the tensors of a contribution."""
        memory = bytearray(self.nbytes)
        self._copy(parts, self.parts(memory))
        return memory

    def read(self, memory: bytearray, into: Contribution) -> None:
        """Copy the tensors in a memory into a contribution; slots that did not travel stay as they are there."""
        self._copy(self.parts(memory), into)

    def parts(self, memory: bytearray) -> Contribution:
        """Return the contribution whose tensors lie in a memory; without slots, where these did not travel."""
        weights = [region.of(memory) for region in self._weights]
        counts = [region.of(memory) for region in self._counts]
        *slots, has = [region.of(memory) for region in self._rest] or [torch.zeros(1, dtype=torch.uint8)]
        return Contribution(weights, counts, slots, has, [region.of(memory) for region in self._momentum])

    def _copy(self, source: Contribution, target: Contribution) -> None:
        tensors: list[tuple[list[Tensor], list[Tensor]]] = [
            (source.weights, target.weights),
            (source.counts, target.counts),
        ]
        if self._slots:
            tensors += [(source.slots, target.slots), ([source.has], [target.has])]
        if self._momentum:
            tensors.append((source.momentum, target.momentum))
        for mine, theirs in tensors:
            for a, b in zip(mine, theirs, strict=True):
                b.copy_(a)
