"""Convolutions and pooling over an image that lies on the ranks in strips: each rank makes its rows of the output.

The layer itself is torch's own, called on the rows that its outputs read; padding along the dimension that is cut is
put around them only where the image ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.comm.group import Group
from apportion.parallel.spatial_conv import Geometry, convolve_strip
from apportion.parallel.strips import (
    Bounds,
    Rows,
    Spread,
    Window,
    equal,
    insides,
    outputs_of,
    sizes,
    strip,
    wanted_by,
)
from apportion.parallel.strips_tensor import (
    Strip,
    fetched,
    filled,
    gathered,
    nothing,
    pad_dim,
    padded,
    part_of,
    summed,
)

_MAX = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGE = (functional.avg_pool2d, functional.avg_pool2d, functional.avg_pool3d)
_ADAPTIVE = {
    "avg": (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d),
    "max": (functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d),
}
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def each(value: Any, dims: int) -> tuple[int, ...]:
    """A number for each dimension."""
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    return tuple(int(n) for n in (numbers * dims if len(numbers) == 1 else numbers))


@dataclass(frozen=True, kw_only=True)
class Conv:
    """The settings of a convolution, by dimension."""

    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    mode: str = "zeros"

    @classmethod
    def of(  # noqa: PLR0913 (what a convolution has)
        cls, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, mode: str = "zeros"
    ) -> Conv:
        dims = weight.dim() - 2
        dilations = each(dilation, dims)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
            before, after = tuple(n // 2 for n in total), tuple(n - n // 2 for n in total)
        else:
            before = after = (0,) * dims if padding == "valid" else each(padding, dims)
        return cls(
            stride=each(stride, dims), before=before, after=after, dilation=dilations, groups=groups, mode=mode
        )

    def with_groups(self, groups: int) -> Conv:
        return replace(self, groups=groups)

    def window(self, weight: Tensor, at: int) -> Window:
        return Window(weight.shape[at + 2], self.stride[at], self.dilation[at], self.before[at])


def conv(x: Strip, weight: Tensor, bias: Tensor | None, settings: Conv, group: Group) -> Strip:
    """Conv1d, Conv2d, Conv3d."""
    dims, at = weight.dim() - 2, x.dim - 2
    if settings.mode != "zeros" and (any(settings.before) or any(settings.after)):
        x, settings = _pad_first(x, settings, group)
    window, after = settings.window(weight, at), settings.after[at]
    made = outputs_of(window, x.bounds, _positive(window.outputs(x.length, after), x))
    symmetric = all(settings.before[d] == settings.after[d] for d in range(dims) if d != at)
    geometry = Geometry(settings.stride, settings.before, settings.dilation, settings.groups)
    if x.source is None and symmetric and not torch.is_autocast_enabled(x.own.device.type):
        inside = insides(window, x.bounds, made)
        if inside is not None:
            return Strip(convolve_strip(x.own.contiguous(), weight, bias, geometry, x.dim, inside, group), x.dim, made)
    rows = fetched(x, wanted_by(window, x.bounds, made), group)
    for d in range(dims):
        if d != at and not symmetric:
            rows = pad_dim(rows, d + 2, settings.before[d], settings.after[d])
    padding = tuple(0 if d == at or not symmetric else settings.before[d] for d in range(dims))
    reads = window.reads(strip(made, group.rank))
    if reads.n > 0:
        rows = filled(rows, x.dim, reads, x.length)
        y = _conv(rows, weight, bias, settings, padding)
        return Strip(y, x.dim, made)
    shape = [x.own.shape[0], weight.shape[0]]
    for d in range(dims):
        span = rows.shape[d + 2] + 2 * padding[d] - (weight.shape[d + 2] - 1) * settings.dilation[d] - 1
        shape.append(0 if d == at else span // settings.stride[d] + 1)
    return Strip(nothing(shape, rows, weight, bias), x.dim, made)


def _conv(rows: Tensor, weight: Tensor, bias: Tensor | None, settings: Conv, padding: tuple[int, ...]) -> Tensor:
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
    y: Tensor = function(rows, weight, bias, settings.stride, padding, settings.dilation, settings.groups)
    return y


def _pad_first(x: Strip, settings: Conv, group: Group) -> tuple[Strip, Conv]:
    """Padding that is made of the image."""
    none = (0,) * len(settings.stride)
    rest = Conv(stride=settings.stride, before=none, after=none, dilation=settings.dilation, groups=settings.groups)
    pairs = list(zip(settings.before, settings.after, strict=True))
    if x.source is not None:
        flat = [n for pair in reversed(pairs) for n in pair]
        whole = functional.pad(x.source, flat, mode=settings.mode)
        return part_of(whole, x.dim, equal(whole.shape[x.dim], group.size), group), rest
    for dim, pair in enumerate(pairs, 2):
        if dim != x.dim and any(pair):
            x = x.like(pad_across(x.own, dim, pair, settings.mode))
    return padded(x, *pairs[x.dim - 2], group, mode=settings.mode), rest


def pad_across(x: Tensor, dim: int, pair: Sequence[int], mode: str) -> Tensor:
    """Along a dimension that is not cut."""
    if x.numel() == 0 or mode == "constant":
        return pad_dim(x, dim, *pair)
    moved = x.movedim(dim, -1)
    return functional.pad(moved.flatten(1, -2), list(pair), mode=mode).unflatten(1, moved.shape[1:-1]).movedim(-1, dim)


def _positive(outputs: int, x: Strip) -> int:
    if outputs < 1:
        raise ValueError(f"an image of {x.length} rows is smaller than the layer's window")
    return outputs


def _across(x: Strip, dims: int) -> list[int]:
    """The dimensions of the image that are not cut."""
    return [d for d in range(dims) if d + 2 != x.dim]


def conv_transpose(  # noqa: PLR0913 (what a convolution is of)
    x: Strip, weight: Tensor, bias: Tensor | None, settings: Conv, output_padding: Any, group: Group
) -> Strip:
    """ConvTranspose1d, ConvTranspose2d, ConvTranspose3d: the outputs of the rows that are wanted, cut to size."""
    dims, at = weight.dim() - 2, x.dim - 2
    extra = each(output_padding, dims)
    layer = Spread(weight.shape[at + 2], settings.stride[at], settings.dilation[at], settings.before[at])
    outputs = (x.length - 1) * layer.stride - 2 * layer.before + layer.extent + extra[at]
    made = outputs_of(layer, x.bounds, _positive(outputs, x))
    wanted = wanted_by(layer, x.bounds, made)
    rows, own, real = fetched(x, wanted, group), strip(made, group.rank), wanted[group.rank]
    padding, extra = _put(settings.before, at, 0), _put(extra, at, 0)
    if own.n == 0 or real.n == 0:
        shape = [x.own.shape[0], weight.shape[1] * settings.groups]
        for d in range(dims):
            reach = (weight.shape[d + 2] - 1) * settings.dilation[d] + 1 + extra[d] - 2 * padding[d]
            shape.append(own.n if d == at else (rows.shape[d + 2] - 1) * settings.stride[d] + reach)
        y = nothing([*shape[: x.dim], 0, *shape[x.dim + 1 :]], rows, weight)
        y = pad_dim(y, x.dim, 0, own.n)
    else:
        y = _TRANSPOSED[dims - 1](
            rows, weight, None, settings.stride, padding, extra, settings.groups, settings.dilation
        )
        first = real.start * layer.stride - layer.before
        y = pad_dim(y, x.dim, first - own.start, own.stop - first - y.shape[x.dim])
    if bias is not None:
        y = y + bias.view(-1, *[1] * dims)
    return Strip(y, x.dim, made)


def _put(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The settings of a pooling layer, by dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool = False

    @classmethod
    def of(  # noqa: PLR0913 (what a pooling layer has)
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


def _pooled(x: Strip, settings: Pool, group: Group, fill: float) -> tuple[Tensor | None, Bounds, tuple[int, ...]]:
    """The rows that this rank's outputs read (None for no outputs: then what is fetched is in the shape's place),
    the strips of the output, and the output's shape."""
    dims, at = len(settings.kernel), x.dim - 2
    window = settings.window(at)
    made = outputs_of(window, x.bounds, _positive(settings.outputs(at, x.length), x))
    rows = fetched(x, wanted_by(window, x.bounds, made), group)
    reads = window.reads(strip(made, group.rank))
    shape = [*x.own.shape[:2], *(0 if d == at else settings.outputs(d, rows.shape[d + 2]) for d in range(dims))]
    if reads.n <= 0:
        return nothing(shape, rows), made, ()
    return filled(rows, x.dim, reads, x.length, fill), made, tuple(shape)


def max_pool(x: Strip, settings: Pool, group: Group) -> Strip:
    """MaxPool1d, MaxPool2d, MaxPool3d."""
    rows, made, shape = _pooled(x, settings, group, float("-inf"))
    if shape:
        dims = len(settings.kernel)
        padding = _put(settings.padding, x.dim - 2, 0)
        rows = _MAX[dims - 1](rows, settings.kernel, settings.stride, padding, settings.dilation, settings.ceil)
    assert rows is not None
    return Strip(rows, x.dim, made)


def average_pool(x: Strip, settings: Pool, group: Group, *, padded: bool, divisor: int | None) -> Strip:
    """AvgPool1d, AvgPool2d, AvgPool3d: sums, divided by how many values each is of. ``padded``: counting those in the
    padding; ``divisor``: divided by that instead."""
    dims, at = len(settings.kernel), x.dim - 2
    rows, made, shape = _pooled(x, settings, group, 0.0)
    assert rows is not None
    if not shape:
        return Strip(rows, x.dim, made)
    kernel, stride, padding = settings.kernel, settings.stride, _put(settings.padding, at, 0)
    lengths = [x.length if d == at else x.own.shape[d + 2] for d in range(dims)]
    outputs = [strip(made, group.rank) if d == at else Rows(0, shape[d + 2]) for d in range(dims)]
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
    return Strip(y, x.dim, made)


def adaptive_pool(x: Strip, output_size: Any, kind: str, group: Group) -> Strip | Tensor:
    """AdaptiveAvgPool and AdaptiveMaxPool: output row o is of the rows o L // k to those before ceil((o + 1) L / k).
    To a single row it is the whole tensor, on every rank."""
    dims, at, length = x.own.dim() - 2, x.dim - 2, x.length
    given = output_size if isinstance(output_size, Sequence) else [output_size] * dims
    target = [x.own.shape[d + 2] if n is None else int(n) for d, n in enumerate(given)]
    function: Any = _ADAPTIVE[kind][dims - 1]
    many = length if given[at] is None else target[at]
    if many == 1:
        return _to_one(x, target, kind, group)
    made = equal(many, group.size)
    reads = [Rows(o * length // many, -(-(o + 1) * length // many)) for o in range(many)]
    owned = [reads[made[rank] : made[rank + 1]] for rank in range(group.size)]
    wanted = tuple(Rows(of[0].start, of[-1].stop) if of else Rows(0, 0) for of in owned)
    rows, mine = fetched(x, wanted, group), strip(made, group.rank)
    target[at] = 1
    if mine.n == 0:
        return Strip(nothing([*x.own.shape[:2], *_put(tuple(target), at, 0)], rows), x.dim, made)
    first = wanted[group.rank].start
    parts = [
        function(rows.narrow(x.dim, reads[o].start - first, reads[o].n), tuple(target)) for o in range(*mine)
    ]
    return Strip(torch.cat(parts, x.dim), x.dim, made)


def _to_one(x: Strip, target: Sequence[int], kind: str, group: Group) -> Tensor:
    """One row, of which every rank has a part."""
    function: Any = _ADAPTIVE[kind][x.own.dim() - 3]
    at = x.dim - 2
    own = x.own
    if own.shape[x.dim]:
        part = function(own, _put(tuple(target), at, 1))
    else:
        part = nothing([*own.shape[:2], *_put(tuple(target), at, 0)], own)
    if kind == "avg":
        part = part * (own.shape[x.dim] / x.length) if own.shape[x.dim] else pad_dim(part, x.dim, 0, 1)
        return summed(part, group)
    found = [min(n, 1) for n in sizes(x.bounds)]
    bounds = tuple(sum(found[:rank]) for rank in range(group.size + 1))
    maxima: Tensor = function(gathered(Strip(part, x.dim, bounds), group), tuple(target))
    return maxima


def upsample(x: Strip, scale: int, mode: str, group: Group, across: Sequence[int]) -> Strip:
    """Interpolation to a multiple of the rows; linear ones look at a row on either side. ``across``: the size of the
    image along every dimension; that of this rank's rows is put in."""
    at, reach = x.dim - 2, 0 if mode.startswith("nearest") else 1
    window = Window(1 + 2 * reach, 1, 1, reach)
    made = tuple(scale * n for n in x.bounds)
    wanted = wanted_by(window, x.bounds, x.bounds)
    rows, mine = fetched(x, wanted, group), strip(x.bounds, group.rank)
    size = list(across)
    if mine.n == 0:
        return Strip(nothing([*x.own.shape[:2], *_put(tuple(size), at, 0)], rows), x.dim, made)
    size[at] = rows.shape[x.dim] * scale
    y = functional.interpolate(rows, size, mode=mode, align_corners=None if not reach else False)
    return Strip(y.narrow(x.dim, (mine.start - wanted[group.rank].start) * scale, mine.n * scale), x.dim, made)


def local_response_norm(x: Strip, size: int, alpha: float, beta: float, k: float, group: Group) -> Strip:  # noqa: PLR0913 (what the layer has)
    """Over channels: a strip of the image has all of them; a rank with some of them needs a few of its neighbours'."""
    if x.dim != 1:
        return x.like(functional.local_response_norm(x.own, size, alpha, beta, k) if x.own.numel() else x.own * 1)
    window = Window(size, 1, 1, size // 2)
    wanted = wanted_by(window, x.bounds, x.bounds)
    rows, mine = fetched(x, wanted, group), strip(x.bounds, group.rank)
    if mine.n == 0:
        return x.like(rows.narrow(1, 0, 0))
    y = functional.local_response_norm(rows, size, alpha, beta, k)
    return x.like(y.narrow(1, mine.start - wanted[group.rank].start, mine.n))


def pixel_shuffle(x: Strip, factor: int) -> Strip:
    """Each pixel becomes a square of them."""
    made = tuple(n * factor for n in x.bounds)
    return Strip(functional.pixel_shuffle(x.own, factor), x.dim, made)
