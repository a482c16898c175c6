"""Linear layers that put the gradient of their weight directly where it is needed.

The gradient of a weight (outputs x inputs) is a product of what each example gave: at a small batch these factors are
much smaller than their product. Exchanging them, each rank forms the whole batch's gradient of its own rows only: the
same numbers, with far less to move and to write ("sufficient factor broadcasting": Xie et al., "Lighter-Communication
Distributed Machine Learning via Sufficient Factor Broadcasting", 2016; the choice by size: Zhang et al., "Poseidon",
2017).

A layer takes its gradient only where autograd would have accumulated it into ``weight.grad`` in that very pass, which
it asks the engine. Where a gradient is handed out (``torch.autograd.grad``), or is itself differentiated, or the weight
has a hook, or another tensor stands in the weight's place, autograd does all of it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from apportion.core import fast_paths, torch_private
from apportion.parallel.ops.matmul import add_weight_gradient, input_gradient, outputs, weight_gradient


class Sink(Protocol):
    """A receiver for a layer's share of its weight's gradient."""

    def __call__(self, inputs: Tensor, gradient: Tensor) -> None:
        """Add the product of the inputs (rows, in) and the gradient of the outputs (rows, out) to the weight's
        gradient."""


def factored(weight: Tensor, rows: int) -> bool:
    """Return whether the factors of ``rows`` rows, over all ranks, are smaller than the gradient."""
    outputs, inputs = weight.shape
    return rows * (inputs + outputs) <= inputs * outputs


def plain_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weight is used by nothing but an ordinary Linear, as far as the model's structure tells;
    none where the plain path is asked for."""
    if fast_paths.is_plain("linear") or not torch_private.can_ask_the_engine:
        return []
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    # A weight that is not a parameter (pruned, or made anew by a hook before each call) has no owner.
    found = [m for m in model.modules() if type(m) is nn.Linear and owners.get(id(m.weight)) == 1]
    return [layer for layer in found if _is_plain(layer.weight)]


def _is_plain(weight: Tensor) -> bool:
    return (
        weight.requires_grad
        and weight.is_floating_point()
        and weight.numel() > 0
        and not torch_private.gradient_hooked(weight)  # which would no longer be called
    )


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
        """Add up the gradients of the backward passes since the last call into ``weight.grad``."""
        for weight, inputs, gradient in self._factors:
            if weight.grad is None:
                weight.grad = weight_gradient(gradient, inputs)
            else:
                add_weight_gradient(weight.grad, gradient, inputs)
        self._factors.clear()


def redirect(layer: nn.Linear, sink: Sink) -> None:
    """Send the gradient of this layer's weight to the sink from now on. In place, by class: names, parameters and hooks
    stay."""
    layer.__class__ = _Redirected
    layer._sink = layer.weight, sink  # type: ignore[assignment]


def computes_as_linear(layer: nn.Module) -> bool:
    """Return whether a layer computes what ``nn.Linear`` does: one of these, wherever its gradient goes."""
    return type(layer) in (nn.Linear, _Redirected)


class _Redirected(nn.Linear):
    _sink: tuple[Tensor, Sink]
    """The sink, and the weight that it is for: another may stand in its place (``torch.func.functional_call``)."""

    def forward(self, x: Tensor) -> Tensor:
        weight, own = self.weight, self._sink
        if (
            not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or weight is not own[0]
            or type(x) not in _PLAIN
            or x.dtype != weight.dtype
            or x.layout is not torch.strided
            or torch.is_autocast_enabled(x.device.type)
            or _in_a_transform()
            or torch_private.in_forward_mode()
        ):
            return functional.linear(x, weight, self.bias)
        y: Tensor = _apply(x, weight, self.bias, own)
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the layer to an ordinary one: a copy's weight is another one, whose gradient goes nowhere else."""
        state = {name: value for name, value in self.__dict__.items() if name != "_sink"}
        return copyreg.__newobj__, (nn.Linear,), state  # type: ignore[attr-defined]


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, own: tuple[Tensor, Sink]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.own = own  # what was saved may come back as a copy of the weight (checkpoint)
        return outputs(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, given = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dw = None
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            dx = rows @ weight if needs_x else None
            dw = rows.t() @ given if needs_weight else None
        else:
            dx = input_gradient(rows, weight) if needs_x else None
            if needs_weight:  # else it was frozen when the layer was called
                dw = _redirected(ctx, given, rows)
        return None if dx is None else dx.view(x.shape), dw, rows.sum(0) if needs_bias else None, None


def _redirected(ctx: Any, given: Tensor, rows: Tensor) -> Tensor | None:
    """Give the gradient of the weight to the sink, where this pass would add it to ``.grad``; return the gradient
    itself where autograd has to have it."""
    weight, sink = ctx.own
    accumulates = _pass_accumulates(ctx.next_functions[1][0])
    if accumulates is None or (accumulates and torch_private.backward_hooked(weight)):
        return weight_gradient(rows, given)
    if accumulates and weight.requires_grad:  # autograd drops the gradient of what was frozen in between, too
        sink(given, rows)
    return None


_PLAIN = (Tensor, nn.Parameter)
_pass_accumulates = torch_private.pass_accumulates
_in_a_transform = torch_private.in_a_transform
_apply = torch_private.applied(_Product)
