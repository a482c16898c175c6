"""What gymnasium asks of an environment, checked where it is read; a message gives what came, the rule and the remedy.

All checks of a step are on the values of K environments at once: they take less time than the step of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.parallel.rollouts.spaces import text_of

Array = NDArray[Any]
_STEP = "step(action) must return five values: observation, reward, terminated, truncated and a dict"


def name_of(environment: Any) -> str:
    """Return what messages call an environment: its class, without gymnasium's wrappers."""
    return type(getattr(environment, "unwrapped", environment)).__name__


def check_environment(environment: Any) -> None:
    """Raise ValueError for an object that cannot be an environment, or whose ``reset`` cannot be given a seed."""
    name = name_of(environment)
    for attribute in ("reset", "step", "observation_space", "action_space"):
        if getattr(environment, attribute, None) is None:
            raise ValueError(f"{name} has no {attribute}: environment= must make an environment of gymnasium's")
    try:
        named = inspect.signature(environment.reset).parameters.values()
    except (TypeError, ValueError):  # some are written in C
        return
    if not any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in named):
        raise ValueError(f"{name}.reset() has no argument seed: define reset(self, *, seed=None, options=None)")


def check_alike(environments: Sequence[Any]) -> None:
    """Raise ValueError where environments are one object, or have different action spaces."""
    first = environments[0]
    if len({id(one) for one in environments}) < len(environments):
        raise ValueError(
            f"environment= returned the same {name_of(first)} twice: it must make a new environment in each call, as "
            "lambda: gymnasium.make(...) does"
        )
    for one in environments:
        if one.action_space != first.action_space:
            raise ValueError(
                f"environment= made environments with the action spaces {text_of(first.action_space)} and "
                f"{text_of(one.action_space)}: one policy plays them all, so that they must have the same action space"
            )


def first_of(name: str, returned: Any, space: Any) -> Any:
    """Return the observation, of this space, of what ``reset`` returned. Raises ValueError where it is not an
    observation and a dict."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned[0]
    raise ValueError(
        f"{name}.reset() returned {_described(returned)}: it must return two values, an observation of "
        f"{text_of(space)} and a dict"
    )


def step_values(name: str, returned: Sequence[Any]) -> tuple[Any, ...]:
    """Return the observations, rewards, ends, cuts and dicts of what each environment's ``step`` returned. Raises
    ValueError where one has not returned five values."""
    try:
        observations, rewards, ended, cut, infos = zip(*returned, strict=True)
    except (TypeError, ValueError):
        wrong = next((one for one in returned if not isinstance(one, tuple | list) or len(one) != 5), returned[0])
        raise ValueError(f"{name}.step() returned {_described(wrong)}: {_STEP}") from None
    return observations, rewards, ended, cut, infos


def check_dicts(name: str, infos: Sequence[Any]) -> None:
    """Raise ValueError where the fifth values of steps are no dicts."""
    for one in infos:
        if not isinstance(one, Mapping):
            raise ValueError(f"{name}.step() returned {_described(one)} as its fifth value: {_STEP}")


def rewards_of(name: str, rewards: Any, count: int) -> Array:
    """Return the rewards of a step, (count,). Raises ValueError where one is not a number."""
    try:
        found = np.asarray(rewards)
    except ValueError:  # they have different shapes
        found = np.empty(0, dtype=object)
    if found.shape == (count,) and found.dtype.kind in "fiub":
        return found
    raise ValueError(f"{name}.step() returned {_odd(rewards, count, _is_number)}: a reward must be one number")


def flags_of(name: str, flags: Any, count: int, what: str) -> Array:
    """Return the ``terminated`` or ``truncated`` of a step, (count,). Raises ValueError where one is not a bool, 0 or
    1."""
    try:
        found = np.asarray(flags)
    except ValueError:
        found = np.empty(0, dtype=object)
    if found.shape == (count,):
        if found.dtype == np.bool_:
            return found
        if found.dtype.kind in "iuf" and np.isin(found, (0, 1)).all():
            return found.astype(np.bool_)
    raise ValueError(f"{name}.step() returned {_odd(flags, count, _is_flag)}: {what} must be a bool")


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub"


def _is_flag(value: Any) -> bool:
    return _is_number(value) and value in (0, 1)


def _odd(values: Any, count: int, fits: Any) -> str:
    """The first of some values that does not fit, in words; the type and shape of all where there are not ``count``."""
    if isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.shape[:1] == (count,)):
        for value in values:
            if not fits(value):
                return _described(value)
    return _described(values)


def _described(value: Any) -> str:
    """A value in a few words."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    if isinstance(value, tuple | list) and not all(isinstance(v, int | float) for v in value):
        return f"{len(value)} values ({', '.join(type(v).__name__ for v in value)})"
    return f"{value!r:.80} ({type(value).__name__})"
