"""How a run's strategy is to be chosen, and what was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from apportion.launch.local import Local
from apportion.planner.drift import Expected
from apportion.strategy import Strategy
from apportion.trial import Candidate, candidate
from apportion.values import parse, parse_as


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How the choice is to be made."""

    trial: bool = True
    """Try the best few? False: take what is predicted."""
    remeasure: bool = False
    """Measure again what is known from earlier runs?"""
    approximate: bool = False
    """May an approximate strategy be taken, where it learns more in the same time?"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a run takes."""

    chosen: Candidate
    told: dict[str, Any] | None
    """The data of a ``plan`` event; None where there was nothing to decide."""
    expected: Expected | None
    """What its steps should take; None: nobody knows."""


def next_best(decision: Decision, disproved: Collection[str], launcher: Local, why: str) -> Decision:
    """What is taken where the proof has said no to these (each as it is written, ``STRATEGY on LAUNCHER``): the next of
    the exact ones that were tried or priced, one process at last. ``why``: the evidence."""
    assert decision.told is not None, "who has named a strategy gets no other"
    rows = [{**row} for row in decision.told["candidates"]]
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
    told = {
        **decision.told,
        "strategy": str(chosen.strategy),
        "launcher": str(chosen.launcher),
        "why": f"the next best, since {why}",
        "candidates": [row for row in rows if row["refused"] is None] + [row for row in rows if row["refused"]],
    }
    return Decision(chosen=chosen, told=told, expected=None)
