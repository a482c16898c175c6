"""The environments that a workload names, opened as K environments that an actor steps at once.

``open_environments`` chooses: a vector of environments, where gymnasium or the user's function makes one
(``VectorOfEnvironments``), or single environments that are stepped one after the other (``EnvironmentLoop``). Both
check what they are given against gymnasium's contract (``environment_contract.py``), and hide from the actor in which
of gymnasium's ways an episode begins again. ``one_that_is_seen`` opens one environment that renders pictures.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from apportion.parallel.rollouts.environment_contract import (
    check_alike,
    check_dicts,
    check_environment,
    first_of,
    flags_of,
    name_of,
    rewards_of,
    step_values,
)
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.spaces import kind_of
from apportion.parallel.rollouts.transition import Environments, Transition

# Vectors of environments, in whichever of gymnasium's three ways they begin again.
#
# ``next step``: the step after the end of an episode resets it, whatever the action. ``same step``: the step that ends
# an episode gives the first observation of the next one, and the last one beside it. ``disabled``: the actor resets
# those that have ended. Which of them it is stands in the vector's metadata.

_ARRAY = np.ndarray
_DOUBLE, _SINGLE, _TRUTH = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.bool_)


def _trust(vector: Any) -> None:
    """Have a vector not ask for each action whether it is one, which takes a quarter of a step of CartPole's: a policy
    over its space gives no others."""
    with contextlib.suppress(AttributeError, TypeError):
        space = copy.copy(vector.action_space)
        space.contains = lambda action: True
        vector.action_space = space


@final
class VectorOfEnvironments:
    """A vector environment of gymnasium's, whose environments share what they draw from. Raises ValueError where it
    breaks gymnasium's contract."""

    def __init__(self, vector: Any, width: int) -> None:
        self._vector = vector
        try:
            self.name = name_of(vector)
            self._check(width)
            self.observed = ObservationFormat(vector.single_observation_space, self.name)
        except BaseException:
            self.close()
            raise
        self.width, self.action_space = width, vector.single_action_space
        self._dtype, self._row, self._shape = self.observed.dtype, (width,), (width, *self.observed.shape)
        _trust(vector)

    def _check(self, width: int) -> None:
        vector = self._vector
        for attribute in ("num_envs", "reset", "step", "single_observation_space", "single_action_space", "metadata"):
            if getattr(vector, attribute, None) is None:
                raise ValueError(
                    f"{self.name} has no {attribute}: a function with an argument is given the number of environments, "
                    "and must return a vector of that number, as gymnasium.vector.SyncVectorEnv is; one without "
                    "arguments must return one environment"
                )
        if int(vector.num_envs) != width:
            raise ValueError(
                f"{vector} has {vector.num_envs} environments where {width} are asked for: the function that makes it "
                "is to take their number, environment=lambda n: ..."
            )
        mode = vector.metadata.get("autoreset_mode")
        self._mode = str(getattr(mode, "value", mode))
        if self._mode not in ("NextStep", "SameStep", "Disabled"):
            raise ValueError(
                f"{vector} says in its metadata that it begins episodes again by autoreset_mode={mode!r}: it must be "
                "one of gymnasium's AutoresetMode: NEXT_STEP, SAME_STEP or DISABLED"
            )

    def reset(self, seed: int) -> Array:
        """The observations may be the vector's own memory until the next step."""
        return self._first_observations(self._vector.reset(seed=seed))

    def _first_observations(self, returned: Any) -> Array:
        return self.observed.batched(first_of(self.name, returned, self._vector.observation_space), self.width)

    def step(self, actions: Array) -> Transition:
        returned = self._vector.step(actions)
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise ValueError(
                f"{self.name}.step() must return five values: observations, rewards, terminations, truncations and a "
                "dict"
            )
        observations, rewards, ended, cut, infos = returned
        # Nearly always it has returned arrays of the right shapes and types, which this sees in half a microsecond;
        # numpy has each type as one object. Others are converted, or named.
        if not (
            type(observations) is type(rewards) is type(ended) is type(cut) is _ARRAY
            and observations.dtype is self._dtype
            and ended.dtype is cut.dtype is _TRUTH
            and (rewards.dtype is _DOUBLE or rewards.dtype is _SINGLE)
            and observations.shape == self._shape
            and rewards.shape == ended.shape == cut.shape == self._row
        ):
            observations = self.observed.batched(observations, self.width)
            rewards = rewards_of(self.name, rewards, self.width)
            ended = flags_of(self.name, ended, self.width, "terminations")
            cut = flags_of(self.name, cut, self.width, "truncations")
        over = ended | cut
        if self._mode == "NextStep":
            return Transition(observations, rewards, ended, cut, None, over)
        last = None
        if over.any():
            last = observations.copy()
            if self._mode == "SameStep":
                self._last_ones(infos, over, last)
            else:  # the reset may write into the memory of what the step returned
                rewards, ended, cut = rewards.copy(), ended.copy(), cut.copy()
                observations = self._first_observations(self._vector.reset(options={"reset_mask": over.copy()}))
        return Transition(observations, rewards, ended, cut, last, None)

    def _last_ones(self, infos: Any, over: Array, last: Array) -> None:
        """Write the last observations of the episodes that are over, which stand beside the first ones of others."""
        if not isinstance(infos, Mapping) or "final_obs" not in infos:
            raise ValueError(
                f"{self.name} begins episodes again in the same step, and its dict has no final_obs: it must have the "
                "last observations of episodes that are over"
            )
        final = infos["final_obs"]
        if isinstance(final, np.ndarray) and final.dtype == object:  # an observation for each, or None
            for k in np.flatnonzero(over):
                last[k] = self.observed.gathered([final[k]])[0]
        else:
            last[over] = self.observed.batched(final, self.width)[over]

    def close(self) -> None:
        getattr(self._vector, "close", lambda: None)()


# Single environments that are stepped one after the other.

Array = NDArray[Any]


@final
class EnvironmentLoop:
    """Single environments, one after the other, each with a generator of its own: episode e of environment k is seeded
    from (seed, k, e). Raises ValueError where one breaks gymnasium's contract."""

    def __init__(self, make: Callable[[], Any], width: int, first: Any = None) -> None:
        """``first``: one that is open already."""
        self._all = [] if first is None else [first]
        try:
            while len(self._all) < width:
                self._all.append(make())
            for one in self._all:
                check_environment(one)
            check_alike(self._all)
            self.name = name_of(self._all[0])
            self.observed = ObservationFormat(self._all[0].observation_space, self.name)
        except BaseException:  # those that did open are of no use
            self.close()
            raise
        self.width = width
        self.action_space = self._all[0].action_space
        self._whole = kind_of(self.action_space) == "Discrete"
        self._stepped = False

    def reset(self, seed: int) -> Array:
        self._seed, self._episodes = seed, [0] * self.width
        return self.observed.gathered([self._reset_one(k) for k in range(self.width)])

    def _reset_one(self, k: int) -> Any:
        seed = np.random.SeedSequence((self._seed, k, self._episodes[k])).generate_state(1)[0]
        self._episodes[k] += 1
        return first_of(self.name, self._all[k].reset(seed=int(seed)), self.observed.space)

    def step(self, actions: Array) -> Transition:
        # A row of a scalar Box stays an array, as its space has it; a Discrete action is a number of Python's.
        each = actions.tolist() if self._whole else [actions[k, ...] for k in range(self.width)]
        returned = [one.step(action) for one, action in zip(self._all, each, strict=True)]
        seen, gained, over, limited, infos = step_values(self.name, returned)
        if not self._stepped:
            check_dicts(self.name, infos)
            self._stepped = True
        observations = self.observed.gathered(seen)
        rewards = rewards_of(self.name, gained, self.width)
        ended = flags_of(self.name, over, self.width, "terminated")
        cut = flags_of(self.name, limited, self.width, "truncated")
        last: Array | None = None
        finished = ended | cut
        if finished.any():
            last = observations.copy()
            for k in np.flatnonzero(finished):
                observations[k] = self.observed.gathered([self._reset_one(int(k))])[0]
        return Transition(observations, rewards, ended, cut, last, None)

    def render(self) -> Array:
        """Draw the first one: (height, width, 3)."""
        return np.asarray(self._all[0].render())

    def close(self) -> None:
        for one in self._all:
            getattr(one, "close", lambda: None)()


Factory = Callable[..., Any]
QUIET = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
"""Settings of pygame, which draws into memory here, and need not look for a screen."""


def open_environments(environment: str | Factory, width: int) -> Environments:
    """Open ``width`` environments: by the vector that gymnasium, or the package, has of them, else one by one.

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
    if takes_a_number(environment):
        return VectorOfEnvironments(environment(width), width)
    made = environment()
    if not hasattr(made, "num_envs"):
        return EnvironmentLoop(environment, width, made)
    return VectorOfEnvironments(made, width)


def one_that_is_seen(environment: str | Factory) -> EnvironmentLoop | None:
    """Open one environment that renders pictures (``render``); None where there is none whose observations are those
    that the network is given, or it cannot draw."""
    import gymnasium

    if not isinstance(environment, str):
        made = None if takes_a_number(environment) else environment()
        if made is None:
            return None
        if getattr(made, "render_mode", None) == "rgb_array" and not hasattr(made, "num_envs"):
            return EnvironmentLoop(environment, 1, made)
        getattr(made, "close", lambda: None)()
        return None
    spec = gymnasium.spec(environment)
    for name, quiet in QUIET.items():
        os.environ.setdefault(name, quiet)
    try:
        one = gymnasium.make(environment, render_mode="rgb_array", disable_env_checker=True)
    except Exception:  # what it draws with is not installed
        return None
    if spec.vector_entry_point is not None:
        several = open_environments(environment, 1)
        alike = several.observed.space == one.observation_space
        several.close()
        if not alike:
            one.close()
            return None
    return EnvironmentLoop(lambda: one, 1, one)


def takes_a_number(make: Callable[..., Any]) -> bool:
    """Does a function need an argument?"""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some are written in C
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
