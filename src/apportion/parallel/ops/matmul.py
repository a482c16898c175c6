"""The three matrix products of a Linear layer, each in the form that is fastest on a CPU for its number of rows.

Strategies that divide a batch or a layer multiply with few rows, where the usual form loses up to half its speed: a
library lays the larger matrix out anew for every product, and at some sizes cuts it badly. Measured with MKL on one
core, GFLOP/s, a weight of 4096 x 2048:

::

    rows                      32           64          128         256
    outputs               87 -> 120   110 -> 125    132 -> 132      162
    gradient of inputs    89 ->  89   109 -> 147    106 -> 146      155
    gradient of weight   149 -> 149    80 -> 146    118 -> 154      160

The form follows from the sizes alone: the same sums in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from apportion.core import fast_paths, torch_private

SMALL = 1 << 16
"""The number of elements of a weight below which the usual form is as fast."""
LARGE = 1 << 21
"""The number of elements of a weight from which its gradient is written in pieces."""
FEW = 96
"""The number of rows up to which the weight goes on the left."""
MIDDLING = range(48, 192)
"""The numbers of rows for which products with the gradient of the outputs go in pieces."""
OUTPUTS, ROWS = 512, 128
"""The number of outputs that a piece of the gradient of the inputs sums over; and of those in a piece of the weight's
gradient."""


def linear_form() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return ``linear``, or torch's own function where the plain path is asked for."""
    return functional.linear if fast_paths.is_plain("linear") else linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``functional.linear``, and its gradients too, in the fastest form."""
    if not _suits(x, weight) or torch_private.in_a_transform() or torch_private.in_forward_mode():
        return functional.linear(x, weight, bias)
    y: Tensor = _LinearFunction.apply(x, weight, bias)
    return y


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the outputs of a linear layer: x (..., in), weight (out, in), bias (out) -> (..., out)."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW or not _suits(x, weight):
        return _no_view(functional.linear(x, weight, bias))
    turned = rows.t().contiguous()
    product = weight @ turned if bias is None else torch.addmm(bias[:, None], weight, turned)
    y = x.new_empty(*x.shape[:-1], len(weight))  # no view: what comes after may write to it in place
    y.view(len(rows), len(weight)).copy_(product.t())
    return y


def _no_view(y: Tensor) -> Tensor:
    """Return a tensor on the same memory that is not a view: what a function of autograd's gives as a view may not be
    written to in place. torch computes other than two dimensions as two, and gives a view of these."""
    if y.dim() == 2:
        return y
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs: dy (rows, out), weight (out, in) -> (rows, in)."""
    if len(dy) not in MIDDLING or len(weight) <= OUTPUTS or not _suits(dy, weight):
        return dy @ weight
    dx = dy[:, :OUTPUTS] @ weight[:OUTPUTS]
    for start in range(OUTPUTS, len(weight), OUTPUTS):
        piece = slice(start, start + OUTPUTS)
        dx = dx.addmm_(dy[:, piece], weight[piece])
    return dx


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the weight: dy (rows, out), x (rows, in) -> (out, in)."""
    gradient = dy.new_empty(dy.shape[1], x.shape[1])
    for piece in _pieces(dy, gradient):
        torch.mm(dy[:, piece].t(), x, out=gradient[piece])
    return gradient


def add_weight_gradient(gradient: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add the gradient of the weight, of dy (rows, out) and x (rows, in), to ``gradient`` (out, in)."""
    for piece in _pieces(dy, gradient):
        gradient[piece].addmm_(dy[:, piece].t(), x)


def _pieces(dy: Tensor, gradient: Tensor) -> list[slice]:
    if len(dy) not in MIDDLING or gradient.numel() < LARGE or dy.device.type != "cpu":
        return [slice(None)]
    return [slice(start, start + ROWS) for start in range(0, len(gradient), ROWS)]


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and weight.numel() >= SMALL
        and x.dtype == weight.dtype
        and x.is_floating_point()  # of complex numbers the gradient is a product with the conjugate
        and not torch.is_autocast_enabled("cpu")
    )


class _LinearFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return outputs(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, given = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            dx = rows @ weight if ctx.needs_input_grad[0] else None
            dw = rows.t() @ given if ctx.needs_input_grad[1] else None
        else:
            dx = input_gradient(rows, weight) if ctx.needs_input_grad[0] else None
            dw = weight_gradient(rows, given) if ctx.needs_input_grad[1] else None
        return None if dx is None else dx.view(x.shape), dw, rows.sum(0) if ctx.needs_input_grad[2] else None
