"""An actor: some environments that the network plays, a rollout at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from apportion.core.sampling.sampler import mix
from apportion.parallel.rollouts.environments import Environments
from apportion.parallel.rollouts.policy import ActionPolicy

Array = NDArray[Any]
Act = Callable[[Array], Array]
"""The numbers of the policy, (K, numbers), for observations (K, ...)."""


@dataclass
class Rollout:
    """T steps of K environments, as arrays (T, K, ...)."""

    observations: Array
    """(T + 1, K, ...): the last ones are those that the next rollout begins with."""
    actions: Array
    rewards: Array
    ended: Array
    cut: Array
    counts: Array
    last_at: Array
    """(T, K): the number in ``last`` of the observation with which an episode was cut; -1 where none was."""
    last: Array
    """(F, ...)."""
    scores: list[float] = field(default_factory=list)
    """The sums of the rewards of the episodes that came to an end."""


@final
class Actor:
    """Environments, and where they are. ``key``: the number of this actor among all."""

    def __init__(self, environments: Environments, policy: ActionPolicy, *, seed: int, key: int) -> None:
        self._environments, self._policy, self._seed, self._key = environments, policy, seed, key
        self._observations: Array | None = None
        self._resets: Array | None = None
        self._score = np.zeros(environments.width)

    def play(self, act: Act, steps: int, number: int) -> Rollout:
        """Play so many steps. ``number``: of this rollout, which keys what is drawn."""
        environments, width = self._environments, self._environments.width
        if self._observations is None:
            self._observations = environments.reset(mix(self._seed, self._key, number, 0xE27) & 0x7FFFFFFF)
            self._resets = None
        generator = np.random.Generator(np.random.Philox(key=mix(self._seed, self._key, number, 0xAC7)))
        noise = self._policy.noise(generator, (steps, width))
        now = self._observations
        seen = np.empty((steps + 1, *now.shape), dtype=now.dtype)
        rewards, counts = np.empty((steps, width)), np.ones((steps, width), dtype=bool)
        ended, cut = np.zeros((steps, width), dtype=bool), np.zeros((steps, width), dtype=bool)
        actions: Array | None = None
        last_at = np.full((steps, width), -1, dtype=np.int64)
        last: list[Array] = []
        scores: list[float] = []
        for t in range(steps):
            seen[t] = now
            chosen = self._policy.act(act(now), noise[t])
            if actions is None:
                actions = np.empty((steps, *chosen.shape), dtype=chosen.dtype)
            actions[t] = chosen
            if self._resets is not None:
                counts[t] = ~self._resets
            moved = environments.step(chosen)
            now, rewards[t], self._resets = moved.observations, moved.rewards, moved.resets
            over = moved.ended | moved.cut
            self._score += rewards[t]
            if over.any():
                ended[t], cut[t] = moved.ended, moved.cut & ~moved.ended
                scores += self._score[over].tolist()
                self._score[over] = 0.0
                if moved.last is not None:
                    for k in np.flatnonzero(cut[t]):
                        last_at[t, k] = len(last)
                        last.append(moved.last[k])
        seen[steps] = now
        self._observations = now
        assert actions is not None
        kept = np.stack(last) if last else np.empty((0, *now.shape[1:]), dtype=now.dtype)
        return Rollout(seen, actions, rewards, ended, cut, counts, last_at, kept, scores)

    def close(self) -> None:
        self._environments.close()
