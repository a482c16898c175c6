"""A plan that was predicted, once its best few have made real steps.

A pilot is a trial of whether an approximate strategy learns enough for the time that it saves. It and an exact strategy
train from the same seed for the same time, in turns; what counts is the loss, on the same examples, at equal time.

::

    exact        train | loss |               | train | loss |              ...
    approximate               | train | loss |               | train | loss ...
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.planner.build import make
from apportion.planner.candidate import Measurement, Priced
from apportion.planner.plan import Plan
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
    able = [candidate(p.strategy, p.local, p.cost) for p in planned.found if p.cost is not None and p.local is not None]
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


TURNS = 12
"""The number of turns that the time of each training is divided into."""
LAST = 3
"""The number of the last turns whose losses are compared: the loss of a single turn may be high or low by chance."""
EXAMPLES = 1024
"""The number of examples that the loss is computed on at most."""


@dataclass(frozen=True, kw_only=True)
class Piloted:
    """The result of two trainings side by side."""

    exact: tuple[float, ...]
    """The loss of the exact strategy after each turn."""
    approximate: tuple[float, ...]
    steps: tuple[int, int]
    """The numbers of steps made by the exact strategy, and by the approximate one."""
    seconds: float
    """The seconds that each of them trained."""

    @property
    def better(self) -> bool:
        """Has the approximate strategy the lower loss at equal time?"""
        return lower(self.approximate, self.exact)

    @property
    def text(self) -> str:
        """The result in words."""
        after = f"after {self.seconds:.1f} s each"
        losses = f"{_last(self.approximate):.4g} against {_last(self.exact):.4g}"
        return f"loss {losses} of the best exact one {after}, from the same seed"


def pilot(
    exact: Candidate,
    approximate: Candidate,
    workload: Workload | str,
    changes: Mapping[str, Any],
    *,
    steps: int,
    seconds: float,
) -> Piloted:
    """Train each for this many seconds, or all the ``steps`` that the training has. Raises ValueError where the
    workload has no loss to compare (``update=``), or either cannot run it."""
    with ExitStack() as stack:
        runners = []
        for candidate in (exact, approximate):
            group = TrialWorkers(candidate, workload, changes, steps=steps)
            stack.callback(group.pool.close)
            runners.append(_Runner(group))
        for _ in range(TURNS):
            for runner in runners:
                runner.turn(seconds / TURNS)
    first, second = runners
    return Piloted(
        exact=tuple(first.losses),
        approximate=tuple(second.losses),
        steps=(first.made, second.made),
        seconds=seconds,
    )


def lower(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Report whether the last of these losses are lower than the last of the others. A loss that is not a number is not
    lower."""
    mine, theirs = _last(losses), _last(others)
    return not math.isnan(mine) and (math.isnan(theirs) or mine < theirs)


def _last(losses: Sequence[float]) -> float:
    return fmean(losses[-LAST:])


class _Runner:
    """One of the two trainings, on its way."""

    def __init__(self, group: TrialWorkers) -> None:
        self._group = group
        self._left = int(group.built()["each"])
        self._group.loss(EXAMPLES)  # a workload without a loss is refused before anything is trained
        self._debt = 0.0
        self._a_step: float | None = None
        self.made = 0
        self.losses: list[float] = []

    def turn(self, seconds: float) -> None:
        """Train for this many seconds, less the time by which earlier turns were too long; then compute the loss."""
        self._debt += seconds
        while self._debt > 0 and self._left:
            self._train()
        self.losses.append(self._group.loss(EXAMPLES))

    def _train(self) -> None:
        many = 1 if self._a_step is None else max(1, int(self._debt / self._a_step))
        many = min(many, self._left, 10 * max(1, self.made))  # the first steps are slow, and say little
        began = time.perf_counter()
        self._group.go(many)
        took = time.perf_counter() - began
        self._left -= many
        if self.made:  # the first one sets up what the others use: that does not count as training
            self._debt -= took
        self._a_step = took / many
        self.made += many
