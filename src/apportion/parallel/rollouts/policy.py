"""Policies over the action spaces that there are: what the network's numbers mean, how an action is drawn from them,
and how probable one was.

A policy is the last dimension of what the network gives: for ``Discrete(n)`` n logits; for ``MultiDiscrete`` the logits
of each action, one after the other; for ``MultiBinary`` a logit of 1 for each; for a ``Box`` of d numbers d means and d
logarithms of standard deviations. Choices are counted from 0 and numbers lie in a row, whatever the space's start and
shape are: ``for_environment`` makes of them what the environment takes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apportion.parallel.rollouts.spaces import kind_of, text_of

Array = NDArray[Any]


class ActionPolicy(ABC):
    """The distribution of actions, given the numbers that the network gives for it."""

    numbers: int
    """The numbers that the network gives for each observation."""
    shape: ClassVar[tuple[int, ...]] = ()
    """The shape of an action."""
    dtype: ClassVar[Any] = np.int64
    """The type of an action."""

    @abstractmethod
    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Draw the random numbers for ``shape`` actions: an array of that shape, then that of one action's draws."""

    @abstractmethod
    def act(self, numbers: Array, noise: Array) -> Array:
        """The actions that these numbers and draws give. numbers (n, numbers), noise (n, ...)."""

    @abstractmethod
    def best(self, numbers: Array) -> Array:
        """The most probable actions. numbers (n, numbers)."""

    @property
    def converts(self) -> bool:
        """False where actions are elements of the space as they are."""
        return True

    @abstractmethod
    def for_environment(self, actions: Array) -> Array:
        """The actions (n, ...) as elements of the space."""

    @abstractmethod
    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the probability, or density, of each action, and the entropy of each distribution in nats.
        numbers (..., numbers) -> (...)."""


@final
@dataclass(frozen=True)
class Categorical(ActionPolicy):
    """One of some actions, by logits. ``start``: the number that the environment gives the first one."""

    numbers: int
    start: int = 0

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return generator.random(shape)

    def act(self, numbers: Array, noise: Array) -> Array:
        if self.numbers == 2:  # the usual case, in fewer calls
            apart = (numbers[:, 1] - numbers[:, 0]).astype(np.float64)
            return (noise * (1.0 + np.exp(np.minimum(apart, 700.0))) >= 1.0).astype(np.int64)
        weights = np.exp(numbers - numbers.max(-1, keepdims=True), dtype=np.float64)
        ends = weights.cumsum(-1)
        below: Array = (ends <= noise[..., None] * ends[..., -1:]).sum(-1)
        return np.minimum(below, self.numbers - 1)

    def best(self, numbers: Array) -> Array:
        found: Array = numbers.argmax(-1)
        return found

    @property
    def converts(self) -> bool:
        return self.start != 0

    def for_environment(self, actions: Array) -> Array:
        return actions + self.start

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logs = numbers.log_softmax(-1)
        return logs.gather(-1, actions[..., None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


@dataclass(frozen=True, kw_only=True)
class _Placed(ActionPolicy):
    """A policy over several numbers at once, which a space may have in a shape, and a type, of its own."""

    form: tuple[int, ...] | None = None
    """The shape of an action in the space; None: the numbers in a row."""
    given: str | None = None
    """The type of an action in the space, as numpy writes it; None: that of the policy."""

    def _placed(self, actions: Array) -> Array:
        if self.form is not None:
            actions = actions.reshape(len(actions), *self.form)
        return actions if self.given is None else actions.astype(self.given, copy=False)


@final
@dataclass(frozen=True)
class MultiCategorical(_Placed):
    """Several choices at once, independent of each other given the observation. ``start``: the numbers that the
    environment gives the first of each; (): 0."""

    sizes: tuple[int, ...]
    start: tuple[int, ...] = ()

    @property
    def numbers(self) -> int:  # type: ignore[override] # a sum
        return sum(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override] # one for each
        return (len(self.sizes),)

    def _pieces(self, numbers: Any) -> list[tuple[Categorical, Any]]:
        ends = np.cumsum(self.sizes)
        return [(Categorical(n), numbers[..., end - n : end]) for n, end in zip(self.sizes, ends, strict=True)]

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return generator.random((*shape, len(self.sizes)))

    def act(self, numbers: Array, noise: Array) -> Array:
        return np.stack([p.act(piece, noise[..., i]) for i, (p, piece) in enumerate(self._pieces(numbers))], -1)

    def best(self, numbers: Array) -> Array:
        return np.stack([p.best(piece) for p, piece in self._pieces(numbers)], -1)

    def for_environment(self, actions: Array) -> Array:
        return self._placed(actions + np.asarray(self.start, dtype=np.int64) if self.start else actions)

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        found = [p.judge(piece, actions[..., i]) for i, (p, piece) in enumerate(self._pieces(numbers))]
        chosen, entropies = zip(*found, strict=True)
        return torch.stack(chosen, -1).sum(-1), torch.stack(entropies, -1).sum(-1)


@final
@dataclass(frozen=True)
class Bernoulli(_Placed):
    """Several decisions between 0 and 1, each by the logit of 1, independent given the observation."""

    numbers: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override] # one for each
        return (self.numbers,)

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return generator.random((*shape, self.numbers))

    def act(self, numbers: Array, noise: Array) -> Array:
        below = np.minimum(-numbers.astype(np.float64), 700.0)
        return (noise * (1.0 + np.exp(below)) < 1.0).astype(np.int64)

    def best(self, numbers: Array) -> Array:
        return (numbers > 0).astype(np.int64)

    def for_environment(self, actions: Array) -> Array:
        return self._placed(actions)

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        ones, zeros = nn.functional.logsigmoid(numbers), nn.functional.logsigmoid(-numbers)
        entropies = -(ones.exp() * ones + zeros.exp() * zeros)
        return torch.where(actions.bool(), ones, zeros).sum(-1), entropies.sum(-1)


@final
@dataclass(frozen=True)
class Gaussian(_Placed):
    """Real numbers, each with a mean and the logarithm of a standard deviation, independent given the observation.
    What lies outside of the bounds is cut to them when it is done, and what a space of integers is given is rounded to
    the nearest one; it is learnt of as it was drawn."""

    dtype: ClassVar[Any] = np.float32
    size: int
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    """The bounds of each number, which the type of the space holds exactly."""

    @property
    def numbers(self) -> int:  # type: ignore[override] # two for each
        return 2 * self.size

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override] # one for each
        return (self.size,)

    @cached_property
    def _bounds(self) -> tuple[Array, Array] | None:
        if self.low is None or self.high is None:
            return None
        return np.asarray(self.low, np.float64), np.asarray(self.high, np.float64)

    @cached_property
    def _whole(self) -> bool:
        """True where the space has integers."""
        return np.dtype(self.given or self.dtype).kind in "biu"

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return generator.standard_normal((*shape, self.size))

    def act(self, numbers: Array, noise: Array) -> Array:
        mean, log_deviation = numbers[..., : self.size], numbers[..., self.size :]
        found: Array = (mean + np.exp(log_deviation) * noise).astype(numbers.dtype)
        return found

    def best(self, numbers: Array) -> Array:
        return numbers[..., : self.size]

    def for_environment(self, actions: Array) -> Array:
        if self._whole:  # a network that has diverged gives nan, which no integer is; its loss is reported
            actions = np.nan_to_num(np.rint(actions.astype(np.float64)))
        if self._bounds is not None:
            # In float64, then in the type of the space: rounding keeps the order, and the bounds are not rounded.
            actions = np.clip(actions, *self._bounds).astype(self.given or actions.dtype, copy=False)
        return self._placed(actions)

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = numbers[..., : self.size], numbers[..., self.size :]
        z = (actions - mean) * (-log_deviation).exp()
        chosen = (-0.5 * z * z - log_deviation - 0.5 * math.log(2 * math.pi)).sum(-1)
        return chosen, (log_deviation + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def policy_of(space: Any) -> ActionPolicy:
    """The policy over an action space of gymnasium's. ValueError for a space that has none."""
    kind = kind_of(space)
    if kind == "Discrete":
        return Categorical(int(space.n), int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        sizes = tuple(map(int, space.nvec.flat))
        start = tuple(map(int, np.broadcast_to(getattr(space, "start", 0), space.nvec.shape).flat))
        return MultiCategorical(sizes, start if any(start) else (), form=_form(space.nvec.shape), given=_name(space))
    if kind == "MultiBinary":
        return Bernoulli(math.prod(space.shape), form=_form(space.shape), given=_name(space))
    if kind == "Box":
        low, high = _bounds(space)
        return Gaussian(math.prod(space.shape), low, high, form=_form(space.shape), given=_name(space))
    raise ValueError(
        f"an action space {text_of(space)} has no policy: Discrete, MultiDiscrete, MultiBinary and Box have one; wrap "
        "the environment (gymnasium.ActionWrapper) so that it has one of them"
    )


def _form(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if len(shape) == 1 else tuple(map(int, shape))


def _name(space: Any) -> str:
    return str(np.dtype(space.dtype).str)


def _bounds(space: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The bounds of a Box, each a float64 that is within the space."""
    low, high = space.low.flatten().tolist(), space.high.flatten().tolist()
    return tuple(_within(b, math.inf) for b in low), tuple(_within(b, -math.inf) for b in high)


def _within(bound: Any, towards: float) -> float:
    """The nearest float64 of a bound that is not beyond it: integers above 2**53 may lie between two."""
    found = float(bound)
    if isinstance(bound, int) and (int(found) < bound if towards > 0 else int(found) > bound):
        found = math.nextafter(found, towards)
    return found
