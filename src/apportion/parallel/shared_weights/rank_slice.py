"""The slice of the weights that a rank updates: where it begins and ends, and the pieces that it is updated in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from apportion.parallel.optim.elementwise import FlatPiece
from apportion.parallel.shared_weights.gradient_slots import GradientSlots
from apportion.parallel.shared_weights.layout import SharedRegion
from apportion.parallel.shared_weights.weights_memory import WeightsMemory

PIECE = 1 << 16
"""The number of elements of a piece: with its slots it stays in a core's second-level cache between the operations on
it."""
FACTORED_PIECE = 1 << 20
"""The number of elements of a piece whose gradient is a matrix product: below some 256 rows that loses a third of its
speed."""


@dataclass(frozen=True)
class SlicePart:
    """A piece of this rank's slice: consecutive elements of a region, with one count and one source of gradient."""

    region: SharedRegion
    first: int
    """The number of the first parameter in the piece."""
    versions: tuple[FlatPiece, ...]
    gradients: tuple[Tensor, ...]
    """The gradient of each rank."""
    scratch: Tensor
    layer: int
    """The number of the factored layer, -1: none. Then ``rows`` are those of its weight."""
    rows: slice


@final
class RankSlice:
    """The slice of one rank. ``keeps_gradient``: the gradients of all pieces are there at the same time."""

    def __init__(
        self, memory: WeightsMemory, slots: GradientSlots, rank: int, size: int, *, keeps_gradient: bool
    ) -> None:
        self._memory, self._slots, self._rank, self._size = memory, slots, rank, size
        self._keeps_gradient = keeps_gradient
        self._layer_of = {layer.parameter: k for k, layer in enumerate(memory.layout.layers)}
        self._scratches: dict[torch.dtype, Tensor] = {}
        self.parts = self._cut(self._ranges(coalesced=True))
        """The pieces of the slice, each of as many parameters as lie side by side."""
        self._single: list[SlicePart] | None = None

    def each_parameter(self) -> list[SlicePart]:
        """Return the slice in pieces of one parameter each: some have had more updates than others."""
        if self._single is None:
            self._single = self._cut(self._ranges(coalesced=False))
        return self._single

    def _ranges(self, *, coalesced: bool) -> list[tuple[int, int, int]]:
        """Return (region, from element, to element) of this rank's slice, cut at every parameter, or only where it must
        be."""
        ends = np.cumsum([0, *(region.length for region in self._memory.layout.regions)])
        total = int(ends[-1])
        cuts = [self._cut_point(total * rank // self._size, ends) for rank in (self._rank, self._rank + 1)]
        found = []
        for r, region in enumerate(self._memory.layout.regions):
            edges = {0, region.length}
            following = [*region.starts[1:], region.length]
            for i, start, after in zip(region.parameters, region.starts, following, strict=True):
                if i in self._layer_of:  # and the gap behind it by itself
                    edges |= {start, start + self._memory.parameters[i].numel(), after}
                elif not coalesced:
                    edges |= {start}
            first, last = (min(max(cut - int(ends[r]), 0), region.length) for cut in cuts)
            inside = sorted({first, last, *(e for e in edges if first < e < last)})
            found += [(r, a, b) for a, b in itertools.pairwise(inside) if b > a]
        return found

    def _cut_point(self, wanted: int, ends: Any) -> int:
        """Return a place near the wanted one where two ranks' slices may meet."""
        for r, region in enumerate(self._memory.layout.regions):
            if not ends[r] <= wanted < ends[r + 1]:
                continue
            element = wanted - int(ends[r])
            k = region.number_at(element)
            i, start = region.parameters[k], region.starts[k]
            if i in self._layer_of:
                if element >= start + self._memory.parameters[i].numel():  # in the gap after it
                    return int(ends[r]) + start + self._memory.parameters[i].numel()
                width = self._memory.parameters[i].shape[1]
                return int(ends[r]) + start + (element - start + width // 2) // width * width
            # At the edge of a cache line: two ranks that wrote to the same one would slow each other.
            step = 64 // region.dtype.itemsize
            return int(ends[r]) + element // step * step
        return int(ends[-1])

    def _cut(self, ranges: Sequence[tuple[int, int, int]]) -> list[SlicePart]:
        self._scratches = {}
        parts = []
        for r, first, last in ranges:
            region = self._memory.layout.regions[r]
            k = region.number_at(first)
            i, start = region.parameters[k], region.starts[k]
            layer = self._layer_of.get(i, -1)
            if layer >= 0 and first >= start + self._memory.parameters[i].numel():  # the gap after it
                continue
            width = self._memory.parameters[i].shape[1] if layer >= 0 else 1
            step = max(1, FACTORED_PIECE // width) * width if layer >= 0 else PIECE
            for a in range(first, last, step):
                b = min(a + step, last)
                rows = slice((a - start) // width, (b - start) // width)
                parts.append(self._slice_part(r, slice(a, b), layer, rows))
        return parts

    def _slice_part(self, r: int, at: slice, layer: int, rows: slice) -> SlicePart:
        region = self._memory.layout.regions[r]
        versions = tuple(
            FlatPiece(flat[r].weights[at], tuple(slot[at] for slot in flat[r].slots)) for flat in self._memory.flat
        )
        gradients = tuple(self._slots.gradients[rank][r][at] for rank in range(self._size))
        first = region.parameters[region.number_at(at.start)]
        if self._keeps_gradient:
            scratch = torch.empty(at.stop - at.start, dtype=region.dtype)
        else:
            most = max(PIECE, FACTORED_PIECE if layer >= 0 else 0, at.stop - at.start)
            kept = self._scratches.get(region.dtype)
            if kept is None or kept.numel() < most:
                kept = self._scratches[region.dtype] = torch.empty(most, dtype=region.dtype)
            scratch = kept[: at.stop - at.start]
        return SlicePart(region, first, versions, gradients, scratch, layer, rows)
