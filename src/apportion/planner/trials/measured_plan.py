"""A plan that was predicted, once its best few have made real steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.planner.build import make
from apportion.planner.candidate import Measurement, Priced
from apportion.planner.plan import Plan
from apportion.planner.trials.pilot import pilot
from apportion.planner.trials.trial import Candidate, Measured, TrialWorkers, candidate
from apportion.planner.trials.tune import TuningResult, refine

TRIAL_SECONDS = 20.0
PILOT_SECONDS = 10.0
"""The seconds that the exact strategy trains in a pilot, and the approximate one as well."""


def tried(
    planned: Plan,
    workload: Workload | str,
    *,
    allow_approximate: bool = False,
    seconds: float = TRIAL_SECONDS,
    pilot_seconds: float = PILOT_SECONDS,
) -> Plan:
    """Measure the best few, one process with all threads and plain data_parallel on this machine; correct the rest by
    that, and choose the best of all. ``allow_approximate``: the best approximate strategy is chosen where it has the
    lower loss after the same time, from the same seed. ``seconds``: the time for trials; ``pilot_seconds``: the time
    that each of the two strategies trains for in a pilot."""
    able = [p for p in planned.found if p.cost is not None]
    refined = refine(able, workload, {}, seconds=seconds)
    found = [after(p, refined) for p in planned.found]
    chosen = next(p for p in found if str(p) == str(refined.chosen))
    lines: tuple[str, ...] = ()
    if allow_approximate:
        chosen, lines = _piloted(chosen, found, workload, pilot_seconds)
    again = make(
        found,
        planned.profile,
        planned.cluster,
        workload=planned.workload,
        chosen=chosen,
        workers=planned.only_workers,
    )
    return replace(again, why=(*again.why, *lines), matched=planned.matched)


def after(p: Priced, refined: TuningResult) -> Priced:
    """Return the candidate with what was measured of it, or the reason why it was refused; else corrected by what the
    other trials have taught."""
    assert p.cost is not None or p.refusal
    if p.cost is None:
        return p
    found = next((t for t in refined.tried if str(t) == str(p)), None)
    if found is None:
        return p.corrected_by(refined.correction)
    if found.measured is None:
        return replace(p, cost=None, refusal=found.refused or "it could not run")
    return replace(p, tried=_tried(found.measured))


def _tried(measured: Measured) -> Measurement:
    low, middle, high = (float(q) for q in np.quantile(measured.seconds, (0.25, 0.5, 0.75)))
    return Measurement(
        step_seconds=middle,
        low=low,
        high=high,
        steps=len(measured.seconds),
        terms=measured.terms,
        without_core=measured.without_core_share,
    )


def _piloted(
    exact: Priced, found: Sequence[Priced], workload: Workload | str, seconds: float
) -> tuple[Priced, tuple[str, ...]]:
    """Run a pilot, and return (what to choose, what the pilot said)."""
    others = [p for p in found if p.cost is not None and not p.strategy.exact and p.local is not None]
    best = min(others, key=lambda p: p.seconds_per_example, default=None)
    if best is None or best.seconds_per_example >= exact.seconds_per_example:
        return exact, ("no approximate strategy is faster per example: there is nothing to try in a pilot",)
    assert exact.local is not None
    assert best.local is not None
    pair = candidate(exact.strategy, exact.local), candidate(best.strategy, best.local)
    try:
        piloted = pilot(pair[0], pair[1], workload, {}, steps=_steps(pair[0], workload), seconds=seconds)
    except (ValueError, ApportionError) as error:
        return exact, (f"no pilot of {best}: {error}",)
    verdict = "chosen" if piloted.better else "not chosen"
    return best if piloted.better else exact, (f"pilot of {best}: {piloted.text}: {verdict}",)


def _steps(exact: Candidate, workload: Workload | str) -> int:
    """Return the number of steps of the whole training: a pilot goes no further, and schedules are given it."""
    group = TrialWorkers(exact, workload, {})
    try:
        group.built()
        return int(group.facts()["steps"])
    finally:
        group.pool.close()
