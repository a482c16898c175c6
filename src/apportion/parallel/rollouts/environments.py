"""Environments of gymnasium's, K of them at once, in whichever of its three ways they begin again.

``next step``: the step after the end of an episode resets it, whatever the action. ``same step``: the step that ends
an episode gives the first observation of the next one, and the last one beside it. ``disabled``: whoever plays resets
those that have ended. Which of them it is stands in the environment's metadata.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Factory = Callable[..., Any]
QUIET = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
"""Settings of pygame, which draws into memory here, and need not look for a screen."""


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
    """(K,): True where the next step only resets; None where no step ever does."""


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

    def __init__(self, make: Factory, width: int, first: Any = None) -> None:
        """``first``: one that is open already."""
        self._all = [] if first is None else [first]
        try:
            while len(self._all) < width:
                self._all.append(make())
        except BaseException:  # those that did open are no use to anybody
            self.close()
            raise
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


def _trust(vector: Any) -> None:
    """Have a vector not ask for each action whether it is one, which takes a quarter of a step of CartPole's: a policy
    over its space gives no others."""
    with contextlib.suppress(AttributeError, TypeError):
        space = copy.copy(vector.action_space)
        space.contains = lambda action: True
        vector.action_space = space


@final
class VectorOfEnvironments:
    """A vector environment of gymnasium's, whose environments share what they draw from."""

    def __init__(self, vector: Any, width: int) -> None:
        self._vector, self.width = vector, int(vector.num_envs)
        if self.width != width:
            vector.close()
            raise ValueError(
                f"{vector} has {self.width} environments where {width} are asked for: the function that makes it is to "
                "take their number, environment=lambda n: ..."
            )
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        _trust(vector)
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
        if self._mode == "NextStep":
            return Transition(observations, np.asarray(rewards), ended, cut, None, over)
        last = None
        if over.any():
            if self._mode == "SameStep":
                last = np.zeros_like(observations)
                for k in np.flatnonzero(over):
                    last[k] = told["final_obs"][k]
            else:
                last = observations
                observations = np.asarray(self._vector.reset(options={"reset_mask": over})[0])
        return Transition(observations, np.asarray(rewards), ended, cut, last, None)

    def close(self) -> None:
        self._vector.close()


def open_environments(environment: str | Factory, width: int) -> Environments:
    """Open so many environments: by the vector that gymnasium, or the package, has of them, else one by one.

    environment: an id, with ``package:`` before it where a package registers it; or a function that makes one; or a
    function that is given their number, and makes a vector of them. Raises ValueError for anything else.
    """
    import gymnasium

    if isinstance(environment, str):
        try:
            has_vector = gymnasium.spec(environment).vector_entry_point is not None
        except gymnasium.error.Error as error:
            raise ValueError(f"environment={environment!r}: gymnasium has none of that id ({error})") from error
        if not has_vector:
            return EnvironmentLoop(lambda: gymnasium.make(environment), width)
        return VectorOfEnvironments(
            gymnasium.make_vec(environment, width, vectorization_mode="vector_entry_point"), width
        )
    if not callable(environment):
        raise ValueError(f"environment={environment!r} must be the id of an environment, or a function that makes it")
    if _takes_a_number(environment):
        return VectorOfEnvironments(environment(width), width)
    made = environment()
    if not hasattr(made, "num_envs"):
        return EnvironmentLoop(environment, width, made)
    return VectorOfEnvironments(made, width)


def one_that_is_seen(environment: str | Factory) -> Any | None:
    """Open one environment that renders pictures; None where there is none whose observations are those that the
    network is given, or it cannot draw."""
    import gymnasium

    if not isinstance(environment, str):
        made = None if _takes_a_number(environment) else environment()
        return made if getattr(made, "render_mode", None) == "rgb_array" else None
    spec = gymnasium.spec(environment)
    for name, quiet in (
        ("SDL_VIDEODRIVER", "dummy"),
        ("SDL_AUDIODRIVER", "dummy"),
        ("PYGAME_HIDE_SUPPORT_PROMPT", "1"),
    ):
        os.environ.setdefault(name, quiet)  # pygame draws into memory, and need not look for a screen
    try:
        one = gymnasium.make(environment, render_mode="rgb_array", disable_env_checker=True)
    except Exception:  # what it draws with is not installed
        return None
    if spec.vector_entry_point is not None:
        several = open_environments(environment, 1)
        alike = several.observation_space == one.observation_space
        several.close()
        if not alike:
            one.close()
            return None
    return one


def _takes_a_number(make: Callable[..., Any]) -> bool:
    """Does a function need an argument?"""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some are written in C
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
