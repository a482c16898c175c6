"""The arguments that verbs have in common, as they may be given: values themselves or their texts, and a workload or
its address. Each is refused with what was given, the rule and the remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from apportion.core.place_names import check_place
from apportion.core.value import parse, parse_as, value_of

if TYPE_CHECKING:
    from apportion.core.launcher import Launcher
    from apportion.core.policy import Policy
    from apportion.core.strategy import Strategy
    from apportion.core.workload import Workload

LAUNCHERS = "apportion.runtime.launch"
_STRATEGIES = "apportion.strategies"
_WORKLOAD = "apportion.Workload(model=..., data=..., loss=..., optimizer=..., batch_size=...)"


def strategy_of(given: Strategy | str) -> Strategy:
    """Returns the strategy that is given by itself or as text. Raises ValueError where it is neither."""
    if isinstance(given, str):  # its own module imports what a strategy is
        found: Strategy = parse(given, _STRATEGIES)
        return found
    from apportion.core.strategy import Strategy

    strategy: Strategy = value_of(given, _STRATEGIES, Strategy)
    return strategy


def launcher_of(given: Any) -> Launcher:
    """Returns the launcher that is given by itself or as text, ``local()`` for None. Raises ValueError where it is
    neither."""
    from apportion.core.launcher import Launcher

    if given is None:
        from apportion.runtime.launch.local import Local

        return Local()
    if isinstance(given, int) and not isinstance(given, bool):
        raise ValueError(f"launcher={given} must be a launcher or its text: launcher=apportion.local(workers={given})")
    found: Launcher = value_of(given, LAUNCHERS, Launcher)
    return found


def policy_of(given: Policy | str | None) -> Policy:
    """Returns the policy that is given by itself or as text, the default for None. Raises ValueError where it is
    neither."""
    from apportion.core.policy import Policy

    if given is None:
        return Policy()
    if isinstance(given, str):
        policy: Policy = parse_as(given, Policy)
        return policy
    if isinstance(given, Policy):
        return given
    example = "keep=3"
    if isinstance(given, Mapping) and given and all(isinstance(name, str) for name in given):
        example = ", ".join(f"{name}={value!r}" for name, value in given.items())
    raise ValueError(
        f"policy={given!r} must be a policy or its text: policy=apportion.Policy({example}), or "
        f"policy={f'policy({example})'!r}"
    )


def check_steps(steps: object) -> None:
    """Raises ValueError where the number of updates that are compared or measured is none."""
    from apportion.core.workload_rules import whole

    if not (whole(steps) and isinstance(steps, int) and steps >= 1):
        raise ValueError(f"steps={steps!r} must be a whole number of at least 1 update, as steps=8")


def check_workload(given: Workload | str, verb: str) -> None:
    """Raises ValueError where what is given is neither a workload nor the address of one that is there. ``verb``: what
    takes it."""
    from apportion.core.workload import Workload

    if isinstance(given, str):
        check_place(given)
    if isinstance(given, str | Workload):
        return
    from torch import nn

    if isinstance(given, os.PathLike):
        raise ValueError(
            f"{verb}() takes the address of a workload as text: {verb}({os.fspath(given) + ':workload'!r})"
        )
    kind = type(given).__name__
    if isinstance(given, nn.Module):
        example = _WORKLOAD.replace("model=...", f"model=lambda: {kind}(...)")
        raise ValueError(f"{verb}() takes a Workload, and this is a network, {kind}(...): {verb}({example})")
    if isinstance(given, type) and issubclass(given, nn.Module):
        example = _WORKLOAD.replace("model=...", f"model={given.__name__}")
        raise ValueError(f"{verb}() takes a Workload, and {given.__name__} is a class of networks: {verb}({example})")
    kind = f"a function, {getattr(given, '__name__', kind)}" if callable(given) else f"a {kind}"
    raise ValueError(
        f"{verb}() takes a Workload or its address, FILE:NAME as text, and this is {kind}: {verb}({_WORKLOAD})"
    )
