"""Element-wise update rules of torch's optimizers, on pieces of the flat vector of weights.

Each reads one version of the weights and slots and writes the other. The arithmetic is torch's own; where torch has one
fused kernel for it, that is called, on a copy of the old piece. The parameter store has rules of its own
(``hyperparameters.py``): they leave the gradient as it is, take hyperparameters as plain numbers from shared memory,
and add in the order of torch's plain loop, which is not a fused kernel's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)  # fmt: skip
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from apportion.core import fast_paths, torch_private
from apportion.core.average import SLOT, WeightAverage
from apportion.core.averages.ema import Ema

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)
"""The optimizers that update each weight by itself, so that a shard of a parameter needs nothing of the others."""
BY_PARAMETER = (*ELEMENTWISE, Adafactor, SparseAdam, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))
"""The optimizers that update each parameter by itself, so that a stage needs nothing of the others."""
Group = Mapping[str, Any]
"""An optimizer's parameter group: its hyperparameters, as they are at this step."""


@dataclass(frozen=True)
class FlatPiece:
    """A version of some consecutive elements: weights and slots."""

    weights: Tensor
    slots: tuple[Tensor, ...]


class Update(Protocol):
    """One update of a piece, the ``count``-th of these weights (the first is 1); the gradient may be overwritten."""

    def __call__(self, group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None: ...


@dataclass(frozen=True)
class ElementwiseRule:
    """The rule by which one parameter group is updated."""

    slots: tuple[str, ...]
    """The names of the slots that have the weights' shape, as the optimizer names them."""
    update: Update
    counted: bool
    """Tells whether the optimizer keeps the number of updates, as ``step``."""


def rule_of(optimizer: Optimizer, group: Group) -> ElementwiseRule | None:
    """Return the rule of a group; None where it is not known to be element-wise: such an optimizer gets whole
    parameters."""
    make = _RULES.get(type(optimizer))
    if make is None or torch_private.step_hooked(optimizer) or group.get("capturable") or group.get("differentiable"):
        return None
    if any(p.is_complex() for p in group["params"]):  # torch's rules see two real numbers in each
        return None
    if any(isinstance(value, Tensor) for value in group.values()):  # a learning rate that somebody else may change
        return None
    return make(group)


def with_average(rule: ElementwiseRule | None, average: WeightAverage | str | None) -> ElementwiseRule | None:
    """Return the rule that takes each update into an average of the weights besides; None where it has to know more
    than the number of the update."""
    if rule is None or average is None:
        return rule
    if not isinstance(average, Ema):
        return None
    update, weight = rule.update, 1.0 - average.decay

    def averaged(group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None:
        update(group, count, gradient, replace(old, slots=old.slots[:-1]), replace(new, slots=new.slots[:-1]))
        if count == 1:
            new.slots[-1].copy_(new.weights)
        else:
            torch.lerp(old.slots[-1], new.weights, weight, out=new.slots[-1])

    return replace(rule, slots=(*rule.slots, SLOT), update=averaged)


def _sgd(group: Group) -> ElementwiseRule:
    if not group["momentum"]:
        return ElementwiseRule((), _descend, counted=False)
    return ElementwiseRule(("momentum_buffer",), _descend_with_momentum, counted=False)


def _directed(group: Group, gradient: Tensor, old: FlatPiece) -> Tensor:
    if group["maximize"]:
        gradient.neg_()
    if group["weight_decay"]:
        gradient.add_(old.weights, alpha=group["weight_decay"])
    return gradient


def _descend(group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None:
    torch.add(old.weights, _directed(group, gradient, old), alpha=-group["lr"], out=new.weights)


def _descend_with_momentum(group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None:
    gradient, momentum = _directed(group, gradient, old), group["momentum"]
    buffer, before = new.slots[0], old.slots[0]
    if count == 1:  # torch's first buffer is the gradient, whatever the dampening
        buffer.copy_(gradient)
    elif group["dampening"]:
        torch.mul(before, momentum, out=buffer).add_(gradient, alpha=1 - group["dampening"])
    else:
        torch.add(gradient, before, alpha=momentum, out=buffer)
    step = gradient.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
    torch.add(old.weights, step, alpha=-group["lr"], out=new.weights)


def _adam(group: Group) -> ElementwiseRule:
    slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    decoupled = group.get("decoupled_weight_decay", False)
    kernel = torch_private.fused_adamw if decoupled else torch_private.fused_adam
    if fast_paths.is_plain("fused") or kernel is None:
        kernel = partial(adam, foreach=False, fused=False, decoupled_weight_decay=decoupled)

    def update(group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None:
        _copy(old, new)
        largest = [new.slots[2]] if group["amsgrad"] else []
        kernel(
            [new.weights], [gradient], [new.slots[0]], [new.slots[1]], largest, [_number(count, kernel)],
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=group["amsgrad"], maximize=group["maximize"],
        )  # fmt: skip

    return ElementwiseRule(slots, update, counted=True)


def _adagrad(group: Group) -> ElementwiseRule:
    kernel = torch_private.fused_adagrad
    if fast_paths.is_plain("fused") or kernel is None:
        kernel = partial(adagrad, foreach=False, fused=False)

    def update(group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None:
        _copy(old, new)
        kernel(
            [new.weights], [gradient], [new.slots[0]], [_number(count, kernel)],
            lr=group["lr"], lr_decay=group["lr_decay"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=group["maximize"],
        )  # fmt: skip

    return ElementwiseRule(("sum",), update, counted=True)


def _rmsprop(group: Group) -> ElementwiseRule:
    slots = ["square_avg"]
    slots += ["momentum_buffer"] if group["momentum"] > 0 else []
    slots += ["grad_avg"] if group["centered"] else []

    def update(group: Group, count: int, gradient: Tensor, old: FlatPiece, new: FlatPiece) -> None:
        _copy(old, new)
        named = dict(zip(slots, new.slots, strict=True))
        rmsprop(
            [new.weights], [gradient], [named["square_avg"]],
            [named["grad_avg"]] if group["centered"] else [],
            [named["momentum_buffer"]] if group["momentum"] > 0 else [], [_number(count)],
            foreach=False, maximize=group["maximize"], lr=group["lr"], alpha=group["alpha"], eps=group["eps"],
            weight_decay=group["weight_decay"], momentum=group["momentum"], centered=group["centered"],
        )  # fmt: skip

    return ElementwiseRule(tuple(slots), update, counted=True)


def _number(count: int, kernel: Callable[..., None] | None = None) -> Tensor:
    """Return the number of the update as torch takes it: its own function counts on by itself, a fused kernel does
    not."""
    return torch.tensor(float(count - 1 if isinstance(kernel, partial) else count))


def _copy(old: FlatPiece, new: FlatPiece) -> None:
    if new.weights.data_ptr() != old.weights.data_ptr():
        new.weights.copy_(old.weights)
        for slot, before in zip(new.slots, old.slots, strict=True):
            slot.copy_(before)


_RULES: dict[type[Optimizer], Callable[[Group], ElementwiseRule]] = {
    SGD: _sgd,
    Adam: _adam,
    AdamW: _adam,
    Adagrad: _adagrad,
    RMSprop: _rmsprop,
}
