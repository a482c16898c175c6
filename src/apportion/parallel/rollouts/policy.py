"""Policies over the action spaces that there are: what the network's numbers mean, how an action is drawn from them,
and how probable one was.

A policy is the last dimension of what the network gives: for ``Discrete(n)`` n logits; for ``MultiDiscrete`` the logits
of each action, one after the other; for ``Box(d)`` d means and d logarithms of standard deviations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        """Draw what so many actions are drawn with: ``shape`` and the draws of one action."""

    @abstractmethod
    def act(self, numbers: Array, noise: Array) -> Array:
        """The actions that these numbers and draws give. numbers (n, numbers), noise (n, ...)."""

    @abstractmethod
    def best(self, numbers: Array) -> Array:
        """The most probable actions. numbers (n, numbers)."""

    def bounded(self, actions: Array) -> Array:
        """The actions as the environment takes them."""
        return actions

    @abstractmethod
    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the probability, or density, of each action, and the entropy of each distribution in nats.
        numbers (..., numbers) -> (...)."""


@final
@dataclass(frozen=True)
class Categorical(ActionPolicy):
    """One of some actions, by logits."""

    numbers: int

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

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logs = numbers.log_softmax(-1)
        return logs.gather(-1, actions[..., None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


@final
@dataclass(frozen=True)
class MultiCategorical(ActionPolicy):
    """Several choices at once, independent of each other given the observation."""

    sizes: tuple[int, ...]

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

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        found = [p.judge(piece, actions[..., i]) for i, (p, piece) in enumerate(self._pieces(numbers))]
        chosen, entropies = zip(*found, strict=True)
        return torch.stack(chosen, -1).sum(-1), torch.stack(entropies, -1).sum(-1)


@final
@dataclass(frozen=True)
class Gaussian(ActionPolicy):
    """Real numbers, each with a mean and the logarithm of a standard deviation, independent given the observation.
    What lies outside of the bounds is cut to them when it is done, and learnt of as it was drawn."""

    dtype: ClassVar[Any] = np.float32
    size: int
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    @property
    def numbers(self) -> int:  # type: ignore[override] # two for each
        return 2 * self.size

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override] # one for each
        return (self.size,)

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return generator.standard_normal((*shape, self.size))

    def act(self, numbers: Array, noise: Array) -> Array:
        mean, log_deviation = numbers[..., : self.size], numbers[..., self.size :]
        found: Array = (mean + np.exp(log_deviation) * noise).astype(numbers.dtype)
        return found

    def best(self, numbers: Array) -> Array:
        return numbers[..., : self.size]

    def bounded(self, actions: Array) -> Array:
        return actions if self.low is None else np.clip(actions, self.low, self.high).astype(actions.dtype, copy=False)

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = numbers[..., : self.size], numbers[..., self.size :]
        z = (actions - mean) * (-log_deviation).exp()
        chosen = (-0.5 * z * z - log_deviation - 0.5 * math.log(2 * math.pi)).sum(-1)
        return chosen, (log_deviation + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def policy_of(space: Any) -> ActionPolicy:
    """The policy over an action space of gymnasium's. ValueError for a space that has none."""
    kind = type(space).__name__
    if kind == "Discrete":
        return Categorical(int(space.n))
    if kind == "MultiDiscrete" and space.nvec.ndim == 1:
        return MultiCategorical(tuple(map(int, space.nvec)))
    if kind == "Box" and len(space.shape) == 1:
        return Gaussian(int(space.shape[0]), tuple(map(float, space.low)), tuple(map(float, space.high)))
    raise ValueError(
        f"an action space {space} has no policy: Discrete, MultiDiscrete of one dimension and Box of one dimension do; "
        "wrap the environment so that it has one of them"
    )
