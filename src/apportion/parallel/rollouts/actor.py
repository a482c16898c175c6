"""An actor: some environments that the network plays, a rollout at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from apportion.core import tree
from apportion.core.sampling.sampler import mix
from apportion.parallel.rollouts.environments import Environments
from apportion.parallel.rollouts.policy import ActionPolicy

Array = NDArray[Any]


class Act(Protocol):
    """How a network acts."""

    def __call__(self, observations: Array, state: Any, begins: Array) -> tuple[Array, Any]:
        """The numbers of the policy (K, numbers), and the recurrent state after them, for observations (K, ...), the
        state before them, and whether (K,) each begins an episode."""


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
    returns: Array
    """(T, K): the discounted sum of an episode's rewards so far, after each step."""
    begins: Array
    """(T + 1, K): True where the observation begins an episode."""
    state: Any
    """The recurrent state before the first step, each tensor (K, ...); () where there is none."""
    scores: list[float] = field(default_factory=list)
    """The sums of the rewards of the episodes that came to an end."""
    lengths: list[int] = field(default_factory=list)
    """The steps of the same episodes."""
    acting: float = 0.0
    """The seconds in which the network acted."""
    moving: float = 0.0
    """The seconds in which the environments made their steps."""


@final
class Actor:
    """Environments, and where they are. ``key``: the number of this actor among all; ``state``: the recurrent state
    with which episodes begin."""

    def __init__(
        self, environments: Environments, policy: ActionPolicy, *, seed: int, key: int, gamma: float, state: Any = ()
    ) -> None:
        self._environments, self.policy, self._seed, self._key = environments, policy, seed, key
        self._gamma, self._state = gamma, state
        self._observations: Array | None = None
        width = environments.width
        self._resets: Array | None = None
        self._begins = np.ones(width, dtype=bool)
        self._score, self._return = np.zeros(width), np.zeros(width)
        self._length = np.zeros(width, dtype=np.int64)

    def play(self, act: Act, steps: int, number: int) -> Rollout:
        """Play so many steps. ``number``: of this rollout, which keys what is drawn."""
        if self._observations is None:
            seed = mix(self._seed, self._key, number, 0xE27) & 0x7FFFFFFF
            self._observations = self._environments.reset(seed)
        generator = np.random.Generator(np.random.Philox(key=mix(self._seed, self._key, number, 0xAC7)))
        noise = self.policy.noise(generator, (steps, self._environments.width))
        found = self._empty(steps)
        last: list[Array] = []
        for t in range(steps):
            found.observations[t], found.begins[t] = self._observations, self._begins
            before = time.perf_counter()
            numbers, self._state = act(self._observations, self._state, self._begins)
            found.actions[t] = chosen = self.policy.act(numbers, noise[t])
            acted = time.perf_counter()
            moved = self._environments.step(self.policy.bounded(chosen))
            found.acting += acted - before
            found.moving += time.perf_counter() - acted
            if self._resets is not None:
                found.counts[t] = ~self._resets
            over = moved.ended | moved.cut
            self._begins = over if moved.resets is None else np.zeros_like(over)
            if self._resets is not None:
                self._begins = self._begins | self._resets
            self._observations, found.rewards[t], self._resets = moved.observations, moved.rewards, moved.resets
            self._count(found, t)
            if over.any():
                found.ended[t], found.cut[t] = moved.ended, moved.cut & ~moved.ended
                self._end(found, over)
                if moved.last is not None:
                    for k in np.flatnonzero(found.cut[t]):
                        found.last_at[t, k] = len(last)
                        last.append(moved.last[k])
        found.observations[steps], found.begins[steps] = self._observations, self._begins
        if last:
            found.last = np.stack(last)
        return found

    def _empty(self, steps: int) -> Rollout:
        """A rollout to be filled, with the state that it begins with."""
        assert self._observations is not None
        now, width = self._observations, self._environments.width
        chosen = self.policy.act(np.zeros((width, self.policy.numbers), np.float32), self._nothing())
        return Rollout(
            observations=np.empty((steps + 1, *now.shape), dtype=now.dtype),
            actions=np.empty((steps, *chosen.shape), dtype=chosen.dtype),
            rewards=np.empty((steps, width)),
            ended=np.zeros((steps, width), dtype=bool),
            cut=np.zeros((steps, width), dtype=bool),
            counts=np.ones((steps, width), dtype=bool),
            last_at=np.full((steps, width), -1, dtype=np.int64),
            last=np.empty((0, *now.shape[1:]), dtype=now.dtype),
            returns=np.empty((steps, width)),
            begins=np.empty((steps + 1, width), dtype=bool),
            state=tree.map_tensors(lambda t: t.clone(), self._state),
        )

    def _nothing(self) -> Array:
        return self.policy.noise(np.random.default_rng(0), (self._environments.width,))

    def _count(self, found: Rollout, t: int) -> None:
        """Add the rewards of a step to what its episodes have had so far."""
        counted = found.counts[t]
        self._score += found.rewards[t]
        self._length += counted
        self._return = self._return * self._gamma + found.rewards[t]
        found.returns[t] = self._return

    def _end(self, found: Rollout, over: Array) -> None:
        found.scores += self._score[over].tolist()
        found.lengths += self._length[over].tolist()
        self._score[over] = self._return[over] = 0.0
        self._length[over] = 0

    def close(self) -> None:
        """Let go of the environments."""
        self._environments.close()
