"""An actor: some environments that the network plays, a rollout at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from apportion.core import tree
from apportion.core.rng import mix
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.policy import ActionPolicy
from apportion.parallel.rollouts.transition import Environments

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
    observed: ObservationFormat
    """How the observations are tensors."""
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
    """Environments, and where they are. ``key``: the number of this actor among all; ``gamma``: the discount of the
    returns that are kept, 0 where they are not; ``state``: the recurrent state with which episodes begin."""

    def __init__(
        self, environments: Environments, policy: ActionPolicy, *, seed: int, key: int, gamma: float, state: Any = ()
    ) -> None:
        self._environments, self.policy, self._seed, self._key = environments, policy, seed, key
        self.name = environments.name
        self._gamma, self._state = gamma, state
        self._remembers = bool(tree.tensors(state))
        self._observations: Array | None = None
        width = environments.width
        self._resets = np.zeros(width, dtype=bool)
        """True where the next step only resets."""
        self._begins = np.ones(width, dtype=bool)
        self._score, self._return = np.zeros(width), np.zeros(width)
        self._length = np.zeros(width, dtype=np.int64)

    def play(self, act: Act, steps: int, number: int) -> Rollout:
        """Play ``steps`` steps. ``number``: of this rollout, which keys what is drawn."""
        if self._observations is None:
            seed = mix(self._seed, self._key, number, 0xE27) & 0x7FFFFFFF
            self._observations = self._environments.reset(seed)
        # The draws are a function of the seed, the actor and the rollout: whichever process plays it, they are the
        # same.
        generator = np.random.Generator(np.random.Philox(key=mix(self._seed, self._key, number, 0xAC7)))
        noise = self.policy.noise(generator, (steps, self._environments.width))
        found = self._empty(steps)
        last = self._step_by_step(act, noise, found)
        if last:
            found.last = np.stack(last)
        over = found.ended | found.cut
        if over.any():
            # An environment may report both. What has ended has no value to be estimated after it, so that the end
            # counts.
            found.cut &= ~found.ended
        self._count(found, over)
        return found

    def _step_by_step(self, act: Act, noise: Array, found: Rollout) -> list[Array]:
        """Fill the rollout in; returns the last observations of episodes that were cut."""
        policy, step, clock = self.policy, self._environments.step, time.perf_counter
        converts = policy.converts
        seen, state, begins, resets = self._observations, self._state, self._begins, self._resets
        assert seen is not None
        last: list[Array] = []
        acting = moving = 0.0
        for t in range(len(noise)):
            found.observations[t], found.begins[t] = seen, begins
            before = clock()
            numbers, state = act(seen, state, begins)
            found.actions[t] = chosen = policy.act(numbers, noise[t])
            acted = clock()
            given = policy.for_environment(chosen) if converts else chosen
            seen, rewards, ended, cut, final, next_resets = step(given)
            acting += acted - before
            moving += clock() - acted
            found.rewards[t], found.ended[t], found.cut[t] = rewards, ended, cut
            if final is not None:
                for k in np.flatnonzero(cut & ~ended):
                    found.last_at[t, k] = len(last)
                    last.append(final[k])
            if next_resets is None:
                begins = ended | cut
            else:  # the observation after a step that only resets begins an episode
                np.logical_not(resets, out=found.counts[t])
                begins, resets = resets, next_resets
        found.observations[-1], found.begins[-1] = seen, begins
        found.acting, found.moving = acting, moving
        self._observations, self._state, self._begins, self._resets = seen, state, begins, resets
        return last

    def _empty(self, steps: int) -> Rollout:
        """A rollout to be filled, with the state that it begins with."""
        assert self._observations is not None
        now, width = self._observations, self._environments.width
        return Rollout(
            observations=np.empty((steps + 1, *now.shape), dtype=now.dtype),
            actions=np.empty((steps, width, *self.policy.shape), dtype=self.policy.dtype),
            rewards=np.empty((steps, width)),
            ended=np.empty((steps, width), dtype=bool),
            cut=np.empty((steps, width), dtype=bool),
            counts=np.ones((steps, width), dtype=bool),
            last_at=np.full((steps, width), -1, dtype=np.int64),
            last=np.empty((0, *now.shape[1:]), dtype=now.dtype),
            returns=np.zeros((steps, width)),
            begins=np.empty((steps + 1, width), dtype=bool),
            state=tree.map_tensors(lambda t: t.clone(), self._state) if self._remembers else (),
            observed=self._environments.observed,
        )

    def _count(self, found: Rollout, over: Array) -> None:
        """Add the rewards to what the episodes have had so far, and tell of those that came to an end."""
        for t, rewards in enumerate(found.rewards) if self._gamma else ():
            found.returns[t] = self._return = self._return * self._gamma + rewards
            if over[t].any():
                self._return = np.where(over[t], 0.0, self._return)
        scores, lengths = found.rewards.cumsum(0) + self._score, found.counts.cumsum(0) + self._length
        ended_score, ended_length = np.zeros(over.shape[1]), np.zeros(over.shape[1], dtype=np.int64)
        for t, k in np.argwhere(over):
            found.scores.append(float(scores[t, k] - ended_score[k]))
            found.lengths.append(int(lengths[t, k] - ended_length[k]))
            ended_score[k], ended_length[k] = scores[t, k], lengths[t, k]
        self._score, self._length = scores[-1] - ended_score, lengths[-1] - ended_length

    def close(self) -> None:
        """Let go of the environments."""
        self._environments.close()
