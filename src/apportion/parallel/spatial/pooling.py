"""Pooling and similar operations over an image that lies on the ranks in strips: each rank makes its rows of the
output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.comm.group import Group
from apportion.parallel.spatial.conv import each, possible, put
from apportion.parallel.spatial.geometry import Bounds, RowRange, Window, equal, outputs_of, sizes, strip, wanted_by
from apportion.parallel.spatial.strip import SpatialShard, fetched, filled, gathered, nothing, pad_dim, summed

_MAX = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGE = (functional.avg_pool2d, functional.avg_pool2d, functional.avg_pool3d)
_ADAPTIVE = {
    "avg": (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d),
    "max": (functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d),
}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The settings of a pooling layer, by dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool = False

    @classmethod
    def from_arguments(
        cls, dims: int, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> Pool:
        kernels = each(kernel, dims)
        strides = kernels if stride is None or stride == [] else each(stride, dims)
        return cls(
            kernel=kernels, stride=strides, padding=each(padding, dims), dilation=each(dilation, dims), ceil=ceil
        )

    def window(self, at: int) -> Window:
        return Window(self.kernel[at], self.stride[at], self.dilation[at], self.padding[at])

    def outputs(self, at: int, length: int) -> int:
        return self.window(at).outputs(length, self.padding[at], ceil=self.ceil)


def _pooled(x: SpatialShard, settings: Pool, group: Group, fill: float) -> tuple[Tensor, Bounds, tuple[int, ...]]:
    """The rows that this rank's outputs read, the strips of the output, and the shape of this rank's output. Where the
    rank has no outputs, the shape is empty, and the first value is the output already."""
    dims, at = len(settings.kernel), x.dim - 2
    window = settings.window(at)
    made = outputs_of(window, x.bounds, possible(settings.outputs(at, x.length), x))
    rows = fetched(x, wanted_by(window, x.bounds, made), group)
    reads = window.reads(strip(made, group.rank))
    shape = [*x.own.shape[:2], *(0 if d == at else settings.outputs(d, rows.shape[d + 2]) for d in range(dims))]
    if reads.n <= 0:
        return nothing(shape, rows), made, ()
    return filled(rows, x.dim, reads, x.length, fill), made, tuple(shape)


def max_pool(x: SpatialShard, settings: Pool, group: Group) -> SpatialShard:
    """Compute MaxPool1d, MaxPool2d or MaxPool3d."""
    rows, made, shape = _pooled(x, settings, group, float("-inf"))
    if shape:
        dims = len(settings.kernel)
        padding = put(settings.padding, x.dim - 2, 0)
        rows = _MAX[dims - 1](rows, settings.kernel, settings.stride, padding, settings.dilation, settings.ceil)
    return SpatialShard(rows, x.dim, made)


def average_pool(x: SpatialShard, settings: Pool, group: Group, *, padded: bool, divisor: int | None) -> SpatialShard:
    """Compute AvgPool1d, AvgPool2d or AvgPool3d: sums, divided by the number of values in each. ``padded``: values in
    the padding are counted; ``divisor``: the number to divide by instead."""
    dims, at = len(settings.kernel), x.dim - 2
    rows, made, shape = _pooled(x, settings, group, 0.0)
    if not shape:
        return SpatialShard(rows, x.dim, made)
    kernel, stride, padding = settings.kernel, settings.stride, put(settings.padding, at, 0)
    lengths = [x.length if d == at else x.own.shape[d + 2] for d in range(dims)]
    outputs = [strip(made, group.rank) if d == at else RowRange(0, shape[d + 2]) for d in range(dims)]
    counts = [
        settings.window(d).counts(outputs[d], lengths[d], settings.padding[d], padded=padded) for d in range(dims)
    ]
    alike = all(len(set(numbers)) == 1 for numbers in counts)
    if divisor is None:
        divisor = torch.Size([numbers[0] for numbers in counts]).numel() if alike else None
    if dims == 1:  # avg_pool1d takes no divisor
        rows, kernel, stride, padding = rows.unsqueeze(2), (1, *kernel), (1, *stride), (0, *padding)
    y = _AVERAGE[dims - 1](rows, kernel, stride, padding, settings.ceil, True, divisor or 1)
    y = y.squeeze(2) if dims == 1 else y
    if divisor is None:
        of = torch.ones((), dtype=y.dtype, device=y.device)
        for numbers in counts:
            of = of.unsqueeze(-1) * torch.tensor(numbers, dtype=y.dtype, device=y.device)
        y = y / of
    return SpatialShard(y, x.dim, made)


def adaptive_pool(x: SpatialShard, output_size: Any, kind: str, group: Group) -> SpatialShard | Tensor:
    """Compute AdaptiveAvgPool or AdaptiveMaxPool: output row o is of the rows o L // k to those before ceil((o + 1) L /
    k). Where there is a single output row, the result is the whole tensor, on every rank."""
    dims, at, length = x.own.dim() - 2, x.dim - 2, x.length
    given = output_size if isinstance(output_size, Sequence) else [output_size] * dims
    target = [x.own.shape[d + 2] if n is None else int(n) for d, n in enumerate(given)]
    function: Any = _ADAPTIVE[kind][dims - 1]
    count = target[at] = length if given[at] is None else target[at]
    if count == 1:
        return _to_one(x, target, kind, group)
    made = equal(count, group.size)
    reads = [RowRange(o * length // count, -(-(o + 1) * length // count)) for o in range(count)]
    owned = [reads[made[rank] : made[rank + 1]] for rank in range(group.size)]
    wanted = tuple(RowRange(of[0].start, of[-1].stop) if of else RowRange(0, 0) for of in owned)
    rows, mine = fetched(x, wanted, group), strip(made, group.rank)
    target[at] = 1
    if mine.n == 0:
        return SpatialShard(nothing([*x.own.shape[:2], *put(tuple(target), at, 0)], rows), x.dim, made)
    first = wanted[group.rank].start
    parts = [function(rows.narrow(x.dim, reads[o].start - first, reads[o].n), tuple(target)) for o in range(*mine)]
    return SpatialShard(torch.cat(parts, x.dim), x.dim, made)


def _to_one(x: SpatialShard, target: Sequence[int], kind: str, group: Group) -> Tensor:
    """Pool the image to one row, of which every rank computes a part."""
    function: Any = _ADAPTIVE[kind][x.own.dim() - 3]
    at = x.dim - 2
    own = x.own
    # The gradient of maxima that tie is that of the first, in the order of the pixels: what comes before the dimension
    # that is cut is put together last.
    size = target if kind == "avg" else (*own.shape[2 : x.dim], *target[at:])
    if own.shape[x.dim]:
        part = function(own, put(tuple(size), at, 1))
    else:
        part = nothing([*own.shape[:2], *put(tuple(size), at, 0)], own)
    if kind == "avg":
        part = part * (own.shape[x.dim] / x.length) if own.shape[x.dim] else pad_dim(part, x.dim, 0, 1)
        return summed(part, group)
    found = [min(n, 1) for n in sizes(x.bounds)]
    bounds = tuple(sum(found[:rank]) for rank in range(group.size + 1))
    maxima: Tensor = function(gathered(SpatialShard(part, x.dim, bounds), group), tuple(target))
    return maxima


def upsample(
    x: SpatialShard, size: Sequence[int], factors: Sequence[float] | None, mode: str, group: Group
) -> SpatialShard:
    """Interpolate to a multiple of the rows; linear modes look at a row on either side. ``size``: that of the whole
    image along every dimension; ``factors``: where the model gives them, since torch then does not divide."""
    at, reach = x.dim - 2, 0 if mode.startswith("nearest") else 1
    scale = size[at] // x.length
    window = Window(1 + 2 * reach, 1, 1, reach)
    made = tuple(scale * n for n in x.bounds)
    wanted = wanted_by(window, x.bounds, x.bounds)
    rows, mine = fetched(x, wanted, group), strip(x.bounds, group.rank)
    corners = False if reach else None
    if mine.n == 0:
        one = functional.interpolate(rows.new_zeros(1, 1, *[1] * len(size)), scale_factor=1, mode=mode)
        shape = [*x.own.shape[:2], *put(tuple(size), at, 0)]
        return SpatialShard(nothing(shape, rows, dtype=one.dtype), x.dim, made)
    if factors is None:
        to = put(tuple(size), at, rows.shape[x.dim] * scale)
        y = functional.interpolate(rows, to, mode=mode, align_corners=corners)
    else:
        y = functional.interpolate(rows, scale_factor=tuple(map(float, factors)), mode=mode, align_corners=corners)
    return SpatialShard(y.narrow(x.dim, (mine.start - wanted[group.rank].start) * scale, mine.n * scale), x.dim, made)


def local_response_norm(x: SpatialShard, settings: tuple[int, float, float, float], group: Group) -> SpatialShard:
    """Normalise over channels: a strip of the image has all of them; a rank with some of them needs a few of its
    neighbours'."""
    size, alpha, beta, k = settings
    if x.dim != 1:
        return x.like(functional.local_response_norm(x.own, size, alpha, beta, k) if x.own.numel() else x.own * 1)
    window = Window(size, 1, 1, size // 2)
    wanted = wanted_by(window, x.bounds, x.bounds)
    rows, mine = fetched(x, wanted, group), strip(x.bounds, group.rank)
    if mine.n == 0:
        return x.like(rows.narrow(1, 0, 0))
    y = functional.local_response_norm(rows, size, alpha, beta, k)
    return x.like(y.narrow(1, mine.start - wanted[group.rank].start, mine.n))


def pixel_shuffle(x: SpatialShard, factor: int) -> SpatialShard:
    """Turn each pixel into a square of pixels, made of its channels."""
    made = tuple(n * factor for n in x.bounds)
    if not x.own.numel():
        shape = [x.own.shape[0], x.own.shape[1] // factor**2, *(n * factor for n in x.own.shape[2:])]
        return SpatialShard(nothing(shape, x.own), x.dim, made)
    return SpatialShard(functional.pixel_shuffle(x.own, factor), x.dim, made)
