"""Single environments that are stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable
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
from apportion.parallel.rollouts.transition import Transition

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
        return self.observed.gathered([self._begin(k) for k in range(self.width)])

    def _begin(self, k: int) -> Any:
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
                observations[k] = self.observed.gathered([self._begin(int(k))])[0]
        return Transition(observations, rewards, ended, cut, last, None)

    def render(self) -> Array:
        """Draw the first one: (height, width, 3)."""
        return np.asarray(self._all[0].render())

    def close(self) -> None:
        for one in self._all:
            getattr(one, "close", lambda: None)()
