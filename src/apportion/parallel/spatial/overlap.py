"""A convolution over a strip whose edges need a few rows of its neighbours: they travel while the inside is computed.

::

    rank above   . . . . a |          the rows a and b are sent first
    this rank              | x x x x  ->  y of the own rows alone, zeros beyond the edges
    rank below                      | b . . .
                 then what a adds to the first rows of y, and b to the last

A convolution is linear: what the neighbours' rows add to the outputs at the edges can come later, and nothing that is
large is copied. Backward, the gradients of a and b are computed and sent first, and added to the neighbours' own last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from apportion.comm.group import Group, Work
from apportion.parallel.spatial.geometry import Edge, Inside
from apportion.parallel.spatial.strip import pad_dim

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
            around.append(_among(rows, edge, dim))
            part = at_edge.forward(around[-1], weight, None)
            y.narrow(dim, edge.outputs.start, edge.outputs.n).add_(part)
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


def _among(rows: Tensor, edge: Edge, dim: int) -> Tensor:
    """All rows that the outputs at an edge read, of which only the neighbour's are not zero."""
    return pad_dim(rows, dim, edge.offset, edge.length - edge.offset - edge.rows)
