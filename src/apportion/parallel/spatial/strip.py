"""A tensor that lies on the ranks in strips, and how a rank gets rows that other ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.comm.differentiable import copy_to, gather_from, halo, reduce_from
from apportion.comm.group import Group
from apportion.parallel.spatial.geometry import (
    Bounds,
    RowRange,
    Window,
    equal,
    halo_of,
    hull,
    mirrored,
    outputs_of,
    sizes,
    strip,
)


@dataclass(frozen=True)
class SpatialShard:
    """This rank's part of a tensor that is cut along a dimension."""

    own: Tensor
    dim: int
    bounds: Bounds
    """The bounds of all ranks' parts."""
    source: Tensor | None = None
    """The whole tensor, where this rank has it: then no rows need to be fetched."""
    flat: bool = False
    """True if the model sees the tensor flattened behind dimension 0; it stays as it was until flat values are
    needed."""

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor, as the model sees it."""
        whole = [*self.own.shape[: self.dim], self.length, *self.own.shape[self.dim + 1 :]]
        return torch.Size([whole[0], torch.Size(whole[1:]).numel()] if self.flat else whole)

    def like(self, own: Tensor) -> SpatialShard:
        """A shard that has ``own`` as this rank's rows, with the dimension and the bounds of this one."""
        return replace(self, own=own, source=None)

    def describe(self) -> str:
        """A description for messages: the shape, and the dimension that is cut."""
        return f"{'x'.join(map(str, self.shape))}, cut along dimension {self.dim}"


def cut(whole: Tensor, dim: int, group: Group, bounds: Bounds | None = None) -> SpatialShard:
    """The part that this rank takes of a tensor that all ranks have; the parts' gradients add up to that of the
    whole."""
    return part_of(shared(whole, group), dim, bounds or equal(whole.shape[dim], group.size), group)


def part_of(source: Tensor, dim: int, bounds: Bounds, group: Group) -> SpatialShard:
    """The rows that this rank takes of a tensor that it has to itself."""
    rows = strip(bounds, group.rank)
    return SpatialShard(source.narrow(dim, rows.start, rows.n), dim, bounds, source)


def shared(whole: Tensor, group: Group) -> Tensor:
    """A tensor that all ranks have, for each to make something else of: its gradient is the sum of theirs."""
    return copy_to(whole, group) if whole.requires_grad and torch.is_grad_enabled() else whole


def gathered(x: SpatialShard, group: Group) -> Tensor:
    """The whole tensor on every rank, for what all ranks compute on the same values."""
    whole = x.own if group.size == 1 else gather_from(x.own.contiguous(), group, x.dim, sizes(x.bounds))
    return whole.flatten(1) if x.flat else whole


def summed(part: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, on every rank."""
    return part if group.size == 1 else reduce_from(part.contiguous(), group)


def fetched(x: SpatialShard, wanted: tuple[RowRange, ...], group: Group) -> Tensor:
    """The rows that this rank wants, from the ranks that have them. ``wanted``: what each rank wants."""
    own, rows = x.own, wanted[group.rank]
    if x.source is not None:
        return x.source.narrow(x.dim, rows.start, max(rows.n, 0))
    plan = halo_of(x.bounds, wanted)
    start = strip(x.bounds, group.rank).start
    if not plan.nothing:
        own = halo(own.contiguous(), group, x.dim, plan.before, plan.after, sizes=sizes(x.bounds))
        start -= plan.before[group.rank]
    if rows.n <= 0:
        return own.narrow(x.dim, 0, 0)
    if (start, rows.n) == (rows.start, own.shape[x.dim]):
        return own
    return own.narrow(x.dim, rows.start - start, rows.n)


def redistributed(x: SpatialShard, bounds: Bounds, group: Group) -> SpatialShard:
    """The tensor in other strips."""
    if bounds == x.bounds:
        return x
    wanted = tuple(strip(bounds, rank) for rank in range(group.size))
    return SpatialShard(fetched(x, wanted, group), x.dim, bounds, flat=x.flat)


def padded(
    x: SpatialShard, before: int, after: int, group: Group, *, mode: str = "constant", value: float = 0.0
) -> SpatialShard:
    """The tensor with more rows at its ends (fewer, where negative), as ``functional.pad`` makes them."""
    if mode == "circular" and min(before, after) < 0:  # torch goes round what is left
        x = padded(x, min(before, 0), min(after, 0), group)
        before, after = max(before, 0), max(after, 0)
    window = Window(before=before)
    length = x.length
    made = outputs_of(window, x.bounds, window.outputs(length, after))
    reads = [window.reads(strip(made, rank)) for rank in range(group.size)]
    if mode == "constant":
        wanted = tuple(window.real(strip(made, rank), length) for rank in range(group.size))
        return SpatialShard(filled(fetched(x, wanted, group), x.dim, reads[group.rank], length, value), x.dim, made)
    if (mode == "reflect" and max(before, after) >= length) or (mode == "circular" and max(before, after) > length):
        raise ValueError(f"{mode} padding of {max(before, after)} rows needs an image of more than {length}")
    sources = [mirrored(rows, length, mode) for rows in reads]
    rows = fetched(x, tuple(hull(positions) for positions in sources), group)
    positions = torch.tensor(sources[group.rank], device=rows.device, dtype=torch.int64)
    return SpatialShard(rows.index_select(x.dim, positions - (positions.min() if len(positions) else 0)), x.dim, made)


def filled(real: Tensor, dim: int, reads: RowRange, length: int, value: float = 0.0) -> Tensor:
    """The rows that are read, with those outside of the image filled in."""
    if reads.n <= 0:
        return real
    before = min(max(-reads.start, 0), reads.n)
    after = reads.n - before - real.shape[dim]
    return pad_dim(real, dim, before, after, value) if before or after else real


def pad_dim(x: Tensor, dim: int, before: int, after: int, value: float = 0.0) -> Tensor:
    """Pad a dimension of a tensor with rows at its ends."""
    return functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], value=value)


def nothing(shape: Sequence[int], *of: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor without elements through which a gradient of zeros goes back, so that its rank takes part in every
    exchange. ``dtype``: that of what the other ranks compute; None: that of the first tensor."""
    tensors = [t for t in of if isinstance(t, Tensor)]
    total = torch.stack([t.sum() for t in tensors]).sum().to(dtype or tensors[0].dtype)
    return total.expand(tuple(shape))


def computed(x: Tensor) -> torch.dtype:
    """The dtype that a convolution gives for this tensor: under autocast it is another one."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lower else x.dtype
