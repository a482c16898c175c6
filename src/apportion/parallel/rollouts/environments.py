"""Environments of gymnasium's, K of them at once, in whichever of its three ways they begin again.

``next step``: the step after the end of an episode resets it, whatever the action. ``same step``: the step that ends
an episode gives the first observation of the next one, and the last one beside it. ``disabled``: whoever plays resets
those that have ended. Which of them it is stands in the environment's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Factory = Callable[[], Any]


class Transition(NamedTuple):
    """What one step of K environments gave."""

    observations: Array
    """(K, ...): those to act on next."""
    rewards: Array
    ended: Array
    cut: Array
    last: Array | None
    """(K, ...): the last observations of the episodes that are over; None where none is, or where ``observations`` has
    them."""
    resets: Array | None
    """(K,): True where the next step only resets; None where none does."""


class Environments(Protocol):
    """K environments, of which none is ever over."""

    width: int
    observation_space: Any
    action_space: Any

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere, whose draws depend on the seed alone; returns the observations (K, ...)."""

    def step(self, actions: Array) -> Transition:
        """Do one action in each environment."""

    def close(self) -> None:
        """Let go of them."""


@final
class EnvironmentLoop:
    """Single environments, one after the other, each with a generator of its own: episode e of environment k draws what
    (seed, k, e) says."""

    def __init__(self, make: Factory, width: int) -> None:
        self._all = [make() for _ in range(width)]
        self.width = width
        self.observation_space, self.action_space = self._all[0].observation_space, self._all[0].action_space
        self._whole = type(self.action_space).__name__ == "Discrete"

    def reset(self, seed: int) -> Array:
        self._seed, self._episodes = seed, [0] * self.width
        self._observations = np.stack([self._begin(k) for k in range(self.width)])
        return self._observations.copy()

    def _begin(self, k: int) -> Array:
        seed = np.random.SeedSequence((self._seed, k, self._episodes[k])).generate_state(1)[0]
        self._episodes[k] += 1
        observation: Array = np.asarray(self._all[k].reset(seed=int(seed))[0])
        return observation

    def step(self, actions: Array) -> Transition:
        rewards = np.empty(self.width)
        ended, cut = np.zeros(self.width, dtype=bool), np.zeros(self.width, dtype=bool)
        observations = np.empty_like(self._observations)
        last: Array | None = None
        for k, one in enumerate(self._all):
            action = int(actions[k]) if self._whole else actions[k]
            observations[k], rewards[k], ended[k], cut[k], _ = one.step(action)
            if ended[k] or cut[k]:
                last = np.zeros_like(observations) if last is None else last
                last[k] = observations[k]
                observations[k] = self._begin(k)
        return Transition(observations, rewards, ended, cut, last, None)

    def close(self) -> None:
        for one in self._all:
            one.close()


@final
class VectorOfEnvironments:
    """A vector environment of gymnasium's, whose environments share what they draw from."""

    def __init__(self, vector: Any) -> None:
        self._vector, self.width = vector, int(vector.num_envs)
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        mode = vector.metadata.get("autoreset_mode")
        self._mode = str(getattr(mode, "value", mode))
        if self._mode not in ("NextStep", "SameStep", "Disabled"):
            raise ValueError(
                f"{vector} says in its metadata that it begins episodes again by autoreset_mode={mode!r}: it must be "
                "one of gymnasium's AutoresetMode: NEXT_STEP, SAME_STEP or DISABLED"
            )

    def reset(self, seed: int) -> Array:
        observations: Array = np.asarray(self._vector.reset(seed=seed)[0])
        return observations

    def step(self, actions: Array) -> Transition:
        observations, rewards, ended, cut, told = self._vector.step(actions)
        over = ended | cut
        last, resets = None, None
        if over.any():
            if self._mode == "NextStep":
                resets = over
            elif self._mode == "SameStep":
                last = np.zeros_like(observations)
                for k in np.flatnonzero(over):
                    last[k] = told["final_obs"][k]
            else:
                last = observations
                observations = np.asarray(self._vector.reset(options={"reset_mask": over})[0])
        return Transition(observations, np.asarray(rewards), ended, cut, last, resets)

    def close(self) -> None:
        self._vector.close()


def opened_one_by_one(environment: str | Factory) -> Factory:
    """The function that opens one environment."""
    if callable(environment):
        return environment

    def make() -> Any:
        import gymnasium

        return gymnasium.make(environment)

    return make


def open_environments(environment: str | Factory, width: int, wrappers: Sequence[Any] = ()) -> Environments:
    """Open so many environments: as a vector where gymnasium has one of them and nothing wraps it, else one by one."""
    import gymnasium

    if callable(environment):
        made = environment()
        if isinstance(made, gymnasium.vector.VectorEnv):
            return VectorOfEnvironments(made)
        made.close()
        return EnvironmentLoop(environment, width)
    if not wrappers and gymnasium.spec(environment).vector_entry_point is not None:
        return VectorOfEnvironments(gymnasium.make_vec(environment, width, vectorization_mode="vector_entry_point"))
    return EnvironmentLoop(opened_one_by_one(environment), width)
