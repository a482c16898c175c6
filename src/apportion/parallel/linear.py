"""Linear layers that put the gradient of their weight where it is needed, themselves.

The gradient of a weight (outputs x inputs) is a product of what each example gave: at a small batch these factors are
much smaller than their product. Exchanging them, each rank forms the whole batch's gradient of its own rows only: the
same numbers, with far less to move and to write ("sufficient factor broadcasting": Xie et al., "Lighter-Communication
Distributed Machine Learning via Sufficient Factor Broadcasting", 2016; the choice by size: Zhang et al., "Poseidon",
2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from apportion.parallel.products import add_weight_gradient, input_gradient, outputs, weight_gradient


class Sink(Protocol):
    """Where a layer's share of its weight's gradient goes."""

    def __call__(self, inputs: Tensor, gradient: Tensor) -> None:
        """inputs (rows, in), gradient of the outputs (rows, out): their product is to be added."""


def factored(weight: Tensor, rows: int) -> bool:
    """Are the factors of so many rows, over all ranks, smaller than the gradient?"""
    outputs, inputs = weight.shape
    return rows * (inputs + outputs) <= inputs * outputs


def plain_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers whose weight is used by nothing but an ordinary Linear, as far as the model's structure tells."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and owners[id(module.weight)] == 1
        and module.weight.requires_grad
        and not module.weight._backward_hooks  # which would no longer be called
        and not getattr(module.weight, "_post_accumulate_grad_hooks", None)
    ]


@final
class Products:
    """The gradients of the weights of layers, put off in a backward pass until they are asked for, and added to
    ``weight.grad`` in place: autograd would write each elsewhere first, which takes as long as the product of few rows.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._factors: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer in layers:
            redirect(layer, partial(self._keep, layer.weight))

    def _keep(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> None:
        self._factors.append((weight, inputs.detach(), gradient))  # the graph that made the inputs may go

    @torch.no_grad()
    def add_up(self) -> None:
        """Of the backward passes since the last time."""
        for weight, inputs, gradient in self._factors:
            if weight.grad is None:
                weight.grad = weight_gradient(gradient, inputs)
            else:
                add_weight_gradient(weight.grad, gradient, inputs)
        self._factors.clear()


def redirect(layer: nn.Linear, sink: Sink) -> None:
    """From now on the gradient of this layer's weight goes there. In place, by class: names, parameters and hooks
    stay."""
    layer.__class__ = _Redirected
    layer._sink = sink  # type: ignore[assignment]


class _Redirected(nn.Linear):
    _sink: Sink

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not torch.is_grad_enabled() or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
            return functional.linear(x, weight, self.bias)
        y: Tensor = _Product.apply(x, weight, self.bias, self._sink)
        return y


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return outputs(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = input_gradient(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        ctx.sink(x.reshape(-1, x.shape[-1]), rows)
        return dx, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
