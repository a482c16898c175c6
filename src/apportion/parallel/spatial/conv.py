"""Convolutions over an image that lies on the ranks in strips: each rank makes its rows of the output.

The layer itself is torch's own, called on the rows that its outputs read; padding along the dimension that is cut is
put around them only where the image ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from apportion.comm.group import Group, Work
from apportion.parallel.spatial.geometry import (
    Edge,
    Inside,
    Transposed,
    Window,
    equal,
    insides,
    outputs_of,
    strip,
    wanted_by,
)
from apportion.parallel.spatial.strip import SpatialShard, computed, fetched, filled, nothing, pad_dim, padded, part_of

# A convolution over a strip whose edges need a few rows of its neighbours: they travel while the inside is computed.
#
# ::
#
#     rank above   . . . . a |          the rows a and b are sent first
#     this rank              | x x x x  ->  y of the own rows alone, zeros beyond the edges
#     rank below                      | b . . .
#                  then what a adds to the first rows of y, and b to the last
#
# A convolution is linear: what the neighbours' rows add to the outputs at the edges can come later, and nothing that
# is large is copied. Backward, the gradients of a and b are computed and sent first, and added to the neighbours' own
# last.

_BOTH = (("above", -1), ("below", 1))


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution, as torch's own functions take them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def without_padding(self, at: int) -> Geometry:
        """The convolution's settings with no padding along one of its dimensions."""
        return self.with_padding(at, 0)

    def with_padding(self, at: int, rows: int) -> Geometry:
        padding = (*self.padding[:at], rows, *self.padding[at + 1 :])
        return Geometry(self.stride, padding, self.dilation, self.groups)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        none = [0] * len(self.stride)
        y: Tensor = torch.ops.aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, none, self.groups
        )
        return y

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, the weight and the bias, as far as they are wanted."""
        none, biases = [0] * len(self.stride), [weight.shape[0]]
        found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
            dy, x, weight, biases, self.stride, self.padding, self.dilation, False, none, self.groups, list(wanted)
        )
        return found


def convolve_strip(  # noqa: PLR0913 (what a convolution is of)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    dim: int,
    inside: tuple[Inside, ...],
    group: Group,
) -> Tensor:
    """Compute the outputs that this rank makes. ``inside``: that of every rank, see ``geometry.insides``."""
    y: Tensor = _Convolve.apply(x, weight, bias, geometry, dim, inside, group)
    return y


class _Convolve(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (what a convolution is of)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        dim: int,
        inside: tuple[Inside, ...],
        group: Group,
    ) -> Tensor:
        rank, mine = group.rank, inside[group.rank]
        # All sends are begun before anything is waited for: neighbours that waited for each other first would never
        # end.
        sends = []
        for side, step in _BOTH:
            theirs = _edge(inside, rank + step, "below" if step < 0 else "above")
            if theirs is not None:
                start = 0 if side == "above" else x.shape[dim] - theirs.rows
                sends.append(_send(x.narrow(dim, start, theirs.rows), rank + step, group))
        halos = {}
        for side, step in _BOTH:
            edge: Edge | None = getattr(mine, side)
            if edge is not None:
                rows = x.new_empty([*x.shape[:dim], edge.rows, *x.shape[dim + 1 :]])
                halos[side] = (rows, group.receive(rows, rank + step), edge)
        whole = geometry.with_padding(dim - 2, mine.padding)
        y = whole.forward(x, weight, bias)
        at_edge, around = geometry.without_padding(dim - 2), []
        for rows, work, edge in halos.values():
            work.wait()
            around.append(_zero_padded(rows, edge, dim))
            part = at_edge.forward(around[-1], weight, None)
            y.narrow(dim, edge.outputs.start, edge.outputs.n).add_(part)
        # Waited for last. Until then ``sends`` keeps the rows alive, which may be copies.
        for _, sent in sends:
            sent.wait()
        ctx.save_for_backward(x, weight, *around)
        ctx.of = whole, at_edge, dim, inside, group, tuple(halos), bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, *around = ctx.saved_tensors
        whole, at_edge, dim, inside, group, sides, has_bias = ctx.of
        rank, mine = group.rank, inside[group.rank]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        sends, weights = [], []
        for side, rows in zip(sides, around, strict=True):
            edge: Edge = getattr(mine, side)
            part = dy.narrow(dim, edge.outputs.start, edge.outputs.n)
            d_rows, d_weight, _ = at_edge.backward(part, rows, weight, (needs_x, needs_weight, False))
            weights.append(d_weight)
            if d_rows is not None:
                halo = d_rows.narrow(dim, edge.offset, edge.rows)
                sends.append(_send(halo, rank + (-1 if side == "above" else 1), group))
        arriving = []
        if needs_x:
            for side, step in _BOTH:
                theirs = _edge(inside, rank + step, "below" if step < 0 else "above")
                if theirs is not None:
                    into = dy.new_empty([*x.shape[:dim], theirs.rows, *x.shape[dim + 1 :]])
                    arriving.append((side, into, group.receive(into, rank + step)))
        dx, dw, db = whole.backward(dy, x, weight, (needs_x, needs_weight, has_bias and ctx.needs_input_grad[2]))
        for side, into, work in arriving:
            work.wait()
            start = 0 if side == "above" else x.shape[dim] - into.shape[dim]
            dx.narrow(dim, start, into.shape[dim]).add_(into)
        if dw is not None:
            for d_weight in weights:
                dw.add_(d_weight)
        for _, sent in sends:
            sent.wait()
        return dx, dw, db, None, None, None, None


def _edge(inside: tuple[Inside, ...], rank: int, side: str) -> Edge | None:
    edge: Edge | None = getattr(inside[rank], side) if 0 <= rank < len(inside) else None
    return edge


def _send(rows: Tensor, to: int, group: Group) -> tuple[Tensor, Work]:
    rows = rows.contiguous()
    return rows, group.send(rows, to)


def _zero_padded(rows: Tensor, edge: Edge, dim: int) -> Tensor:
    """All rows that the outputs at an edge read, of which only the neighbour's are not zero."""
    return pad_dim(rows, dim, edge.offset, edge.length - edge.offset - edge.rows)


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
    def from_arguments(
        cls, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, mode: str = "zeros"
    ) -> Conv:
        dims = weight.dim() - 2
        dilations = each(dilation, dims)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
            before, after = tuple(n // 2 for n in total), tuple(n - n // 2 for n in total)
        else:
            before = after = (0,) * dims if padding == "valid" else each(padding, dims)
        return cls(stride=each(stride, dims), before=before, after=after, dilation=dilations, groups=groups, mode=mode)

    def with_groups(self, groups: int) -> Conv:
        return replace(self, groups=groups)

    def window(self, weight: Tensor, at: int) -> Window:
        return Window(weight.shape[at + 2], self.stride[at], self.dilation[at], self.before[at])


def conv(x: SpatialShard, weight: Tensor, bias: Tensor | None, settings: Conv, group: Group) -> SpatialShard:
    """Compute Conv1d, Conv2d or Conv3d."""
    dims, at = weight.dim() - 2, x.dim - 2
    if settings.mode != "zeros" and (any(settings.before) or any(settings.after)):
        x, settings = _pad_first(x, settings, group)
    window, after = settings.window(weight, at), settings.after[at]
    made = outputs_of(window, x.bounds, possible(window.outputs(x.length, after), x))
    symmetric = all(settings.before[d] == settings.after[d] for d in range(dims) if d != at)
    geometry = Geometry(settings.stride, settings.before, settings.dilation, settings.groups)
    # The edges are computed apart only where rows travel at all. _Convolve calls aten below autocast, and with one
    # padding for both ends of a dimension.
    if x.source is None and symmetric and not torch.is_autocast_enabled(x.own.device.type):
        inside = insides(window, x.bounds, made)
        if inside is not None:
            return SpatialShard(
                convolve_strip(x.own.contiguous(), weight, bias, geometry, x.dim, inside, group), x.dim, made
            )
    rows = fetched(x, wanted_by(window, x.bounds, made), group)
    for d in range(dims):
        if d != at and not symmetric:
            rows = pad_dim(rows, d + 2, settings.before[d], settings.after[d])
    padding = tuple(0 if d == at or not symmetric else settings.before[d] for d in range(dims))
    reads = window.reads(strip(made, group.rank))
    if reads.n > 0:
        rows = filled(rows, x.dim, reads, x.length)
        y = plain_conv(rows, weight, bias, settings, padding)
        return SpatialShard(y, x.dim, made)
    shape = [x.own.shape[0], weight.shape[0]]
    for d in range(dims):
        span = rows.shape[d + 2] + 2 * padding[d] - (weight.shape[d + 2] - 1) * settings.dilation[d] - 1
        shape.append(0 if d == at else span // settings.stride[d] + 1)
    return SpatialShard(nothing(shape, rows, weight, bias, dtype=computed(rows)), x.dim, made)


def plain_conv(rows: Tensor, weight: Tensor, bias: Tensor | None, settings: Conv, padding: tuple[int, ...]) -> Tensor:
    """Compute torch's own convolution, with this padding of zeros."""
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
    y: Tensor = function(rows, weight, bias, settings.stride, padding, settings.dilation, settings.groups)
    return y


def _pad_first(x: SpatialShard, settings: Conv, group: Group) -> tuple[SpatialShard, Conv]:
    """Add the padding that is made of the image (a mode other than zeros); returns the padded image, and the settings
    without padding."""
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


def pad_across(x: Tensor, dim: int, pair: Sequence[int], mode: str, value: float = 0.0) -> Tensor:
    """Pad a tensor along a dimension that is not cut."""
    if x.numel() == 0 or mode == "constant":
        return pad_dim(x, dim, pair[0], pair[1], value)
    moved = x.movedim(dim, -1)
    y: Tensor = functional.pad(moved.reshape(1, -1, moved.shape[-1]), list(pair), mode=mode)
    return y.view(*moved.shape[:-1], -1).movedim(-1, dim)


def possible(outputs: int, x: SpatialShard) -> int:
    if outputs < 1:
        raise ValueError(f"an image of {x.length} rows is smaller than the layer's window")
    return outputs


def _across(x: SpatialShard, dims: int) -> list[int]:
    """The dimensions of the image that are not cut."""
    return [d for d in range(dims) if d + 2 != x.dim]


def conv_transpose(
    x: SpatialShard, weight: Tensor, bias: Tensor | None, settings: Conv, output_padding: Any, group: Group
) -> SpatialShard:
    """Compute ConvTranspose1d, ConvTranspose2d or ConvTranspose3d: the outputs of the rows that are wanted, cut to
    size."""
    dims, at = weight.dim() - 2, x.dim - 2
    extra = each(output_padding, dims)
    layer = Transposed(weight.shape[at + 2], settings.stride[at], settings.dilation[at], settings.before[at])
    outputs = (x.length - 1) * layer.stride - 2 * layer.before + layer.extent + extra[at]
    made = outputs_of(layer, x.bounds, possible(outputs, x))
    wanted = wanted_by(layer, x.bounds, made)
    rows, own, real = fetched(x, wanted, group), strip(made, group.rank), wanted[group.rank]
    padding, extra = put(settings.before, at, 0), put(extra, at, 0)
    if own.n == 0 or real.n == 0:
        shape = [x.own.shape[0], weight.shape[1] * settings.groups]
        for d in range(dims):
            reach = (weight.shape[d + 2] - 1) * settings.dilation[d] + 1 + extra[d] - 2 * padding[d]
            shape.append(own.n if d == at else (rows.shape[d + 2] - 1) * settings.stride[d] + reach)
        y = nothing([*shape[: x.dim], 0, *shape[x.dim + 1 :]], rows, weight, dtype=computed(rows))
        y = pad_dim(y, x.dim, 0, own.n)
    else:
        y = _TRANSPOSED[dims - 1](
            rows, weight, None, settings.stride, padding, extra, settings.groups, settings.dilation
        )
        first = real.start * layer.stride - layer.before
        y = pad_dim(y, x.dim, first - own.start, own.stop - first - y.shape[x.dim])
    if bias is not None:
        y = y + bias.to(y.dtype).view(-1, *[1] * dims)
    return SpatialShard(y, x.dim, made)


def put(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])
