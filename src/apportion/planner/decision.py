"""The strategy that a run takes, as it was decided, and what is taken where that turns out to be wrong."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apportion.core.strategy import Strategy
from apportion.core.value import parse, parse_as
from apportion.runtime.launch.local import Local

if TYPE_CHECKING:  # who has decided has both; with them come the processes of trials
    from apportion.planner.performance_monitor import Expected
    from apportion.planner.trials.trial import Candidate


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The settings of the choice of a strategy."""

    trial: bool = True
    """Try the best few candidates? False: take what is predicted to be the fastest."""
    remeasure: bool = False
    """Measure again what is known from earlier runs?"""
    approximate: bool = False
    """May an approximate strategy be taken, where it learns more in the same time?"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The strategy that a run takes, and what is known of it."""

    chosen: Candidate
    plan: dict[str, Any] | None
    """The data of a ``plan`` event; None where there was nothing to decide."""
    expected: Expected | None
    """The time that a step of the run should take; None: not known."""


def next_best(decision: Decision, disproved: Collection[str], launcher: Local, why: str) -> Decision:
    """Return what is taken where the proof has refused these candidates (each written as ``STRATEGY on LAUNCHER``): the
    next of the exact ones that were tried or priced, and one process where there is none. ``why``: the evidence."""
    from apportion.planner.trials.trial import candidate  # few decisions are taken back

    assert decision.plan is not None, "a strategy that was named is not replaced"
    rows = [{**row} for row in decision.plan["candidates"]]
    for row in rows:
        if f"{row['strategy']} on {row['launcher']}" in disproved:
            row["refused"] = row["refused"] or f"it is not the same network: {why}"
    chosen = None
    for row in rows:
        if row["exact"] and row["refused"] is None and (row["step_seconds"] or row["predicted_seconds"]):
            strategy: Strategy = parse(row["strategy"], "apportion.strategies")
            chosen = candidate(strategy, parse_as(row["launcher"], Local))
            break
    if chosen is None:
        chosen = candidate(parse("single_device", "apportion.strategies"), Local(device=launcher.device))
    plan = {
        **decision.plan,
        "strategy": str(chosen.strategy),
        "launcher": str(chosen.launcher),
        "why": f"the next best, since {why}",
        "candidates": [row for row in rows if row["refused"] is None] + [row for row in rows if row["refused"]],
    }
    return Decision(chosen=chosen, plan=plan, expected=None)
