"""The arithmetic by which torch's optimizers change a stretch of flat weights, element by element.

A rule reads the live copy and writes the other one (or the same one: every operation may work in place). The operations
and their order are those of torch.optim's plain loop, so the numbers are torch's to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from apportion.core.value import Value, parse_as
from apportion.parallel.optim.step_hooks import refuse_step_hooks

Hyper = Sequence[float]
"""The hyperparameters of a group as numbers, in the order of the rule's ``hyper``."""


class StoreRule(ABC):
    """The arithmetic of one optimizer. ``slots``: what it keeps beside each weight, by torch's names, in order."""

    optimizer: ClassVar[type[Optimizer]]
    hyper: ClassVar[tuple[str, ...]]
    slots: tuple[str, ...] = ()
    counted: bool = True
    """Tells whether the rule keeps how many updates a weight has behind it."""
    keeps_step: bool = True
    """Tells whether torch keeps the number of updates as a slot of its own, called step."""
    at_once: bool = False
    """Tells whether the slots exist before the first update."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (most do not look at them)
        """Make the rule for an optimizer with these parameter groups."""

    def hyper_of(self, group: Mapping[str, Any]) -> list[float]:
        """Return a group's hyperparameters as numbers."""
        values: list[float] = []
        for name in self.hyper:
            value = group[name]
            values += [float(v) for v in value] if isinstance(value, tuple | list) else [float(value or 0.0)]
        return values

    def numbers(self, group: Mapping[str, Any]) -> int:
        """Return how many numbers a group's hyperparameters are."""
        return len(self.hyper_of(group))

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the slots that torch keeps for this group."""
        return self.slots

    def first(self, slot: str, group: Mapping[str, Any]) -> float:
        """Return a slot's value before the first update."""
        return 0.0

    @abstractmethod
    def apply(self, new: Sequence[Tensor], old: Sequence[Tensor], gradient: Tensor, hyper: Hyper, count: float) -> None:
        """Make one update: weights and slots, from the old ones; ``count`` updates came before it. The gradient is left
        as it is: an update that is cut off is made again."""


def _decayed(gradient: Tensor, weights: Tensor, decay: float, maximize: float) -> Tensor:
    if maximize:
        gradient = -gradient
    return gradient.add(weights, alpha=decay) if decay else gradient


@final
class SGDRule(StoreRule):
    """SGD: w -= lr * g; with momentum b = momentum * b + (1 - dampening) * g, w -= lr * b."""

    optimizer = torch.optim.SGD
    hyper = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    keeps_step = False

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.slots = ("momentum_buffer",) if any(g["momentum"] for g in groups) else ()
        self.counted = any(g["momentum"] and g["dampening"] for g in groups)  # the first gradient is not dampened

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.slots if group["momentum"] else ()

    def apply(self, new: Sequence[Tensor], old: Sequence[Tensor], gradient: Tensor, hyper: Hyper, count: float) -> None:
        lr, momentum, dampening, decay, nesterov, maximize = hyper
        step = _decayed(gradient, old[0], decay, maximize) if decay or maximize else gradient
        if momentum:
            if count or not dampening:
                torch.mul(old[1], momentum, out=new[1]).add_(step, alpha=1 - dampening)
            else:
                new[1].copy_(step)
            step = step.add(new[1], alpha=momentum) if nesterov else new[1]
        elif len(new) > 1 and new[1] is not old[1]:
            new[1].copy_(old[1])
        torch.add(old[0], step, alpha=-lr, out=new[0])


@final
class AdagradRule(StoreRule):
    """Adagrad: s += g * g; w -= lr * g / (sqrt(s) + eps). Duchi, Hazan and Singer, 2011."""

    optimizer = torch.optim.Adagrad
    hyper = ("lr", "lr_decay", "weight_decay", "eps", "maximize")
    slots = ("sum",)
    at_once = True

    def first(self, slot: str, group: Mapping[str, Any]) -> float:
        return float(group["initial_accumulator_value"])

    def apply(self, new: Sequence[Tensor], old: Sequence[Tensor], gradient: Tensor, hyper: Hyper, count: float) -> None:
        lr, lr_decay, decay, eps, maximize = hyper
        step = _decayed(gradient, old[0], decay, maximize)
        torch.addcmul(old[1], step, step, value=1, out=new[1])
        deviation = new[1].sqrt().add_(eps)
        torch.addcdiv(old[0], step, deviation, value=-(lr / (1 + count * lr_decay)), out=new[0])


@final
class RMSpropRule(StoreRule):
    """RMSprop: s = alpha * s + (1 - alpha) * g * g; w -= lr * g / (sqrt(s) + eps). The statistics lie in the store:
    they are shared by all workers, as in A3C (Mnih et al., 2016)."""

    optimizer = torch.optim.RMSprop
    hyper = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        asked = (("momentum_buffer", "momentum"), ("grad_avg", "centered"))
        self.slots = ("square_avg", *(slot for slot, name in asked if any(g[name] for g in groups)))

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        asked = (("momentum_buffer", group["momentum"]), ("grad_avg", group["centered"]))
        return ("square_avg", *(slot for slot, used in asked if used))

    def apply(self, new: Sequence[Tensor], old: Sequence[Tensor], gradient: Tensor, hyper: Hyper, count: float) -> None:
        lr, alpha, eps, decay, momentum, centered, maximize = hyper
        step = _decayed(gradient, old[0], decay, maximize)
        torch.mul(old[1], alpha, out=new[1]).addcmul_(step, step, value=1 - alpha)
        for after, before in zip(new[2:], old[2:], strict=True):
            after.copy_(before)
        if centered:
            mean = new[-1].lerp_(step, 1 - alpha)
            deviation = new[1].addcmul(mean, mean, value=-1).sqrt_().add_(eps)
        else:
            deviation = new[1].sqrt().add_(eps)
        if momentum:
            new[2].mul_(momentum).addcdiv_(step, deviation)
            torch.add(old[0], new[2], alpha=-lr, out=new[0])
        else:
            torch.addcdiv(old[0], step, deviation, value=-lr, out=new[0])


class AdamRule(StoreRule):
    """Adam of Kingma and Ba, 2015; with ``amsgrad`` that of Reddi et al., 2018."""

    optimizer: ClassVar[type[Optimizer]] = torch.optim.Adam
    hyper = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        largest = ("max_exp_avg_sq",) if any(g["amsgrad"] for g in groups) else ()
        self.slots = ("exp_avg", "exp_avg_sq", *largest)

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.slots if group["amsgrad"] else self.slots[:2]

    def apply(self, new: Sequence[Tensor], old: Sequence[Tensor], gradient: Tensor, hyper: Hyper, count: float) -> None:
        lr, beta1, beta2, eps, decay, amsgrad, maximize, decoupled = hyper
        weights = old[0]
        if decay and decoupled:
            weights = torch.mul(weights, 1 - lr * decay, out=new[0])
        step = _decayed(gradient, weights, 0.0 if decoupled else decay, maximize)
        torch.lerp(old[1], step, 1 - beta1, out=new[1])
        second = torch.mul(old[2], beta2, out=new[2]).addcmul_(step, step, value=1 - beta2)
        if amsgrad:
            second = torch.maximum(old[3], second, out=new[3])
        elif len(new) > 3:
            new[3].copy_(old[3])
        correction1, correction2 = 1 - beta1 ** (count + 1), 1 - beta2 ** (count + 1)
        deviation = (second.sqrt() / correction2**0.5).add_(eps)
        torch.addcdiv(weights, new[1], deviation, value=-(lr / correction1), out=new[0])


@final
class AdamWRule(AdamRule):
    """AdamW: Adam with the weights decayed beside the gradient. Loshchilov and Hutter, 2019."""

    optimizer = torch.optim.AdamW


RULES: tuple[type[StoreRule], ...] = (SGDRule, AdagradRule, RMSpropRule, AdamRule, AdamWRule)


def rule_of(optimizer: Optimizer) -> StoreRule:
    """Return the rule of a torch optimizer; ValueError, by name, where the store has none."""
    for rule in RULES:
        if rule.optimizer is type(optimizer):
            for group in optimizer.param_groups:
                if group.get("differentiable"):
                    raise ValueError("differentiable=True: a parameter store's updates have no gradient")
            refuse_step_hooks(optimizer, "the parameter store updates any stretch of the weights by itself")
            return rule(optimizer.param_groups)
    known = ", ".join(rule.optimizer.__name__ for rule in RULES)
    raise ValueError(
        f"the parameter store has no rule for {type(optimizer).__name__}: it updates any stretch of the weights by "
        f'itself; use one of {known}, or name a rule: rule="adagrad(lr=0.01)"'
    )


# Rules by name, for those who give none of the workload's


class NamedRule(Value, ABC):
    """A rule as it is written: ``adagrad(lr=0.01)``. An option that it leaves open has torch's default."""

    @abstractmethod
    def optimizer(self, parameters: Any) -> Optimizer:
        """Return torch's optimizer of this rule."""


@final
@dataclass(frozen=True, repr=False)
class Sgd(NamedRule):
    """Plain gradient descent."""

    lr: float

    def optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


@final
@dataclass(frozen=True, repr=False)
class Momentum(NamedRule):
    """Gradient descent with momentum."""

    lr: float
    momentum: float = 0.9

    def optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


@final
@dataclass(frozen=True, repr=False)
class Adagrad(NamedRule):
    """Adagrad, which Downpour SGD was found to need: a learning rate of its own for each weight."""

    lr: float
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def optimizer(self, parameters: Any) -> Optimizer:
        start = self.initial_accumulator_value
        return torch.optim.Adagrad(parameters, lr=self.lr, eps=self.eps, initial_accumulator_value=start)


@final
@dataclass(frozen=True, repr=False)
class Rmsprop(NamedRule):
    """RMSprop with statistics that all workers share."""

    lr: float
    alpha: float = 0.99
    eps: float = 1e-8

    def optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=self.lr, alpha=self.alpha, eps=self.eps)


@final
@dataclass(frozen=True, repr=False)
class Adam(NamedRule):
    """Adam with moments that all workers share."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr, betas=self.betas, eps=self.eps)


NAMED: dict[str, type[NamedRule]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "rmsprop": Rmsprop,
    "adam": Adam,
}
sgd, momentum, adagrad, rmsprop, adam = Sgd, Momentum, Adagrad, Rmsprop, Adam


def named(text: str | NamedRule) -> NamedRule:
    """Return the rule that ``text`` writes, for example ``adagrad(lr=0.01)``."""
    if isinstance(text, NamedRule):
        return text
    name = text.partition("(")[0].strip()
    if name not in NAMED:
        raise ValueError(f"rule={text!r} must be one of {', '.join(f'{known}(lr=0.01)' for known in NAMED)}")
    value: NamedRule = parse_as(text, NAMED[name])
    return value
