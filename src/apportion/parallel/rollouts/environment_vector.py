"""Vectors of environments, in whichever of gymnasium's three ways they begin again.

``next step``: the step after the end of an episode resets it, whatever the action. ``same step``: the step that ends
an episode gives the first observation of the next one, and the last one beside it. ``disabled``: the actor resets
those that have ended. Which of them it is stands in the vector's metadata.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from apportion.parallel.rollouts.environment_contract import first_of, flags_of, name_of, rewards_of
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.transition import Transition

Array = NDArray[Any]
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
        return self._begun(self._vector.reset(seed=seed))

    def _begun(self, returned: Any) -> Array:
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
                observations = self._begun(self._vector.reset(options={"reset_mask": over.copy()}))
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
