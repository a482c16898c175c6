"""The strategy that ranks take which are running already, where none is given: the best of those that use all of them,
by a plan that these ranks have measured and tried."""

from __future__ import annotations

import time
from typing import Any

from apportion.comm.group import collective
from apportion.comm.objects import broadcast_message
from apportion.comm.world import World
from apportion.core.launcher import Launcher
from apportion.core.workload import Workload
from apportion.planner.candidate import Priced, ranked
from apportion.planner.launched_plan import plan_launched
from apportion.planner.plan import Plan
from apportion.planner.units import milliseconds

MEASURING_SECONDS, TRIAL_SECONDS = 4.0, 3.0
"""The seconds for measuring the hosts and the links between them, and for trying the best few: less than a plan takes
that is asked for by itself."""


@collective
def choose_launched(
    workload: Workload | str, world: World, launcher: Launcher, *, trial: bool, name: str | None = None
) -> dict[str, Any]:
    """Chooses an exact strategy for all ranks of this world. Returns the data of a ``plan`` event, on all of them.
    Raises ValueError, on all of them, where no exact strategy runs on all ranks, or the hosts have unequal numbers of
    ranks.

    ``trial``: the best few are tried; else the best by prediction is taken. ``name``: what refusals call the workload.
    """
    began = time.monotonic()
    plan = plan_launched(workload, world, name=name, trial=trial, seconds=TRIAL_SECONDS, measuring=MEASURING_SECONDS)
    data: dict[str, Any] | None = None
    if plan is not None:
        data = {**described_choice(plan, world.size, str(launcher)), "seconds": time.monotonic() - began}
    data = broadcast_message(data, world.group(), device=world.device)
    if data["strategy"] is None:
        raise ValueError(f"no exact strategy trains this network on these {world.size} ranks: {data['why']}")
    return data


def described_choice(plan: Plan, ranks: int, launcher: str) -> dict[str, Any]:
    """Returns what a plan comes to for as many ranks as are running: the data of a ``plan`` event without the seconds.
    Its ``strategy`` is None where nothing runs on all ranks, and ``why`` says then what refuses."""
    everywhere = [p for p in ranked(plan.found) if p.layout.ranks == ranks]
    able = [p for p in everywhere if p.cost is not None and p.strategy.exact]
    able = [p for p in able if p.tried is not None] or able  # what was measured is surer than any prediction
    alone = next((p for p in ranked(plan.found) if p.layout.ranks == 1 and p.cost is not None), None)
    shown = everywhere if alone is None or ranks == 1 else [*everywhere, alone]
    if able:
        why = _why(able[0], alone, ranks)
    else:
        why = "; ".join(dict.fromkeys(f"{p.strategy}: {p.refusal}" for p in everywhere if p.refusal)) or "none is known"
    return {
        "strategy": str(able[0].strategy) if able else None,
        "launcher": launcher,
        "why": why,
        "candidates": [_row(p, launcher if p.layout.ranks == ranks else str(p.launcher)) for p in shown],
        "remembered": False,
    }


def _why(best: Priced, alone: Priced | None, ranks: int) -> str:
    how = "measured" if best.tried is not None else "predicted"
    why = f"the fastest on all {ranks} ranks, {milliseconds(best.step_seconds)} a step as {how}"
    if alone is not None and ranks > 1 and alone.seconds_per_example < best.seconds_per_example:
        why += f"; one process would be faster, with {milliseconds(alone.step_seconds)}: start one rank alone"
    return why


def _row(p: Priced, launcher: str) -> dict[str, Any]:
    return {
        "strategy": str(p.strategy),
        "launcher": launcher,
        "exact": p.strategy.exact,
        "predicted_seconds": None if p.cost is None else p.cost.step_seconds,
        "step_seconds": None if p.tried is None else p.tried.step_seconds,
        "examples_per_second": None if p.tried is None else p.examples_per_second,
        "refused": p.refusal or None,
    }
