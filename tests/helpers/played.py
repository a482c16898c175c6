"""Actor-critics for tests: small networks, and environments that end, are cut short, raise, or hang."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import apportion
from apportion import Workload

NUMBERS, CHOICES = 3, 2


class Drift:
    """A made environment in which one of two actions goes where the reward is; episodes end at 1, or are cut after 12
    steps. Nothing of gymnasium's is in it but the calls."""

    def __init__(self) -> None:
        import gymnasium

        self.observation_space = gymnasium.spaces.Box(-2.0, 2.0, (NUMBERS,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(CHOICES)
        self.steps = 0

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.at, self.to, self.age = 0.0, float(self.generator.choice([-1.0, 1.0])), 0
        return self._seen(), {}

    def _seen(self) -> np.ndarray:
        return np.array([self.at, self.to, self.age / 12], np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.age += 1
        self.steps += 1
        self.at += (0.3 if action else -0.3) + 0.05 * float(self.generator.standard_normal())
        return self._seen(), -abs(self.to - self.at), abs(self.at) >= 1.0, self.age >= 12, {}

    def close(self) -> None:
        pass


class Broken(Drift):
    """An environment that raises in its 40th step."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.steps == 40:
            raise RuntimeError("the game has crashed")
        return super().step(action)


class Perceptrons(nn.Module):
    """A policy and a value, apart."""

    def __init__(self, numbers: int = NUMBERS, choices: int = CHOICES) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(numbers, 16), nn.Tanh(), nn.Linear(16, choices))
        self.value = nn.Sequential(nn.Linear(numbers, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)


class Normed(Perceptrons):
    """A network that acts by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.policy.insert(1, nn.LayerNorm(16))


class Remembering(nn.Module):
    """A network with a recurrent state."""

    def __init__(self, numbers: int = NUMBERS, choices: int = CHOICES) -> None:
        super().__init__()
        self.cell, self.policy, self.value = nn.GRUCell(numbers, 8), nn.Linear(8, choices), nn.Linear(8, 1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.cell(x, state)
        return self.policy(state), self.value(state), state


def fresh(rows: int) -> Tensor:
    """The state with which an episode begins."""
    return torch.zeros(rows, 8)


def workload(**changes: Any) -> Workload:
    """An actor-critic of two actors, each with four environments, in rollouts of six steps."""
    settings: dict[str, Any] = {
        "model": Perceptrons,
        "optimizer": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99, eps=1e-5),
        "frames": 20 * 2 * 4 * 6,
        "actors": 2,
        "environments": 4,
        "steps": 6,
        "gamma": 0.9,
        "episodes": 4,
        "seed": 3,
    }
    return apportion.actor_critic(changes.pop("environment", Drift), **(settings | changes))


cases = {
    "plain": {},
    "by_torch": {"model": Normed, "gae": 0.95},
    "normalised": {"normalise_observations": True, "normalise_rewards": True, "clip_grad_norm": 0.5},
    "advantages": {"normalise_advantages": True, "entropy": 0.0, "anneal": False},
    "recurrent": {"model": Remembering, "state": fresh},
    "recurrent_normalised": {"model": Remembering, "state": fresh, "normalise_observations": True, "gae": 0.9},
}


class Late(Drift):
    """An environment that hangs after 40 steps where RANK is 1."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.steps == 40 and os.environ.get("RANK") == "1":
            time.sleep(3600)
        return super().step(action)


class Slow(Drift):
    """An environment that takes a while, in evaluations of four episodes of at most twelve steps a second or so."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(0.05)
        return super().step(action)


def judged_by(environment: Any, **changes: Any) -> Workload:
    """The workload with other environments in its evaluation, four times in a run."""
    every = changes.get("frames", 960) // 4
    other = workload(environment=environment, evaluate_every=every, **changes).evaluation
    return replace(workload(**changes), evaluation=other)


class BrokenWhenJudged(Drift):
    """An environment that raises in its fourth step."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.steps == 3:
            raise RuntimeError("the evaluation has crashed")
        return super().step(action)


good = workload(evaluate_every=240)
slow = judged_by(Slow)
broken_when_judged = judged_by(BrokenWhenJudged)
judged_slowly = judged_by(Slow, frames=400 * 2 * 4 * 6)
broken = workload(environment=Broken)
late = workload(environment=Late, frames=250 * 2 * 4 * 6)  # rank 0 must not end before rank 1 has begun
late_by_far = workload(environment=Late, frames=12_000 * 2 * 4 * 6)
longer = workload(frames=400 * 2 * 4 * 6)
endless = workload(frames=12_000 * 2 * 4 * 6)
normed = workload(normalise_observations=True)
