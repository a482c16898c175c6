"""Which environments a workload names: K of them at once, by the vector there is of them, or one by one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from apportion.parallel.rollouts.environment_loop import EnvironmentLoop
from apportion.parallel.rollouts.environment_vector import VectorOfEnvironments
from apportion.parallel.rollouts.transition import Environments

Factory = Callable[..., Any]
QUIET = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
"""Settings of pygame, which draws into memory here, and need not look for a screen."""


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
