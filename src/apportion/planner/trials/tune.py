"""Predict, then try: a few candidates make real steps, in turns; what they teach corrects the predictions of the rest.

1. What is tried: the best three by prediction, and always one process with all threads, the same with fused updates,
   and plain data_parallel where it is best.
2. They are measured in turns (``trial.take_turns``).
3. Measured over predicted gives a few factors (``calibration``); where one that was not tried should now be the
   fastest, it is tried too, once.
4. The fastest is chosen; of those that cannot be distinguished from it (``significance``), the simplest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from apportion.core.strategy import Strategy
from apportion.core.value import written_name
from apportion.core.workload import Workload
from apportion.cost_model.cost import Cost
from apportion.errors import WorkerFailed
from apportion.planner.calibration import Correction, Trial, correction
from apportion.planner.candidate import family
from apportion.planner.trials.significance import alike, faster_confidence
from apportion.planner.trials.trial import Candidate, Measured, TrialWorkers, take_turns
from apportion.runtime.launch.local import Local

TRIAL_SECONDS = 10.0
"""The seconds for everything: building the candidates, and measuring."""
BUILDING = 0.5
"""The share of the time after which no further candidate is built."""
BEST = 3
"""The number of the best candidates by prediction that are tried."""


@dataclass(frozen=True, kw_only=True)
class TuningTrial:
    """A candidate, what was predicted of it, and how it went."""

    strategy: Strategy
    launcher: Local
    predicted: Cost | None
    measured: Measured | None
    refused: str | None = None
    """The reason why the candidate cannot run this workload; None where it can."""

    def __str__(self) -> str:
        return f"{self.strategy} on {self.launcher}"


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The trials that were made, and what they led to."""

    tried: tuple[TuningTrial, ...]
    """The trials, the fastest first; those that were refused are at the end."""
    chosen: TuningTrial
    confidence: float
    """The confidence that the fastest is faster than the second: below ``significance.SURE`` they cannot be
    distinguished."""
    correction: Correction
    """The correction of the predictions by the measurements."""
    seconds: float
    """The seconds that everything took."""


def refine(
    candidates: Sequence[Candidate],
    workload: Workload | str,
    changes: Mapping[str, Any],
    *,
    seconds: float = TRIAL_SECONDS,
    most: int | None = None,
) -> TuningResult:
    """Try what is worth trying of these candidates (the exact ones), ``most`` of them at most, and choose.
    Raises ValueError or WorkerFailed where none of them runs: the error of the first one."""
    Local().prepare()  # what workers are forked from is needed anyway
    began = time.monotonic()
    exact = [c for c in candidates if c.strategy.exact]
    with ExitStack() as stack:
        bench = _Bench(stack, workload, changes, began + BUILDING * seconds)
        bench.build(worth_trying(exact)[:most])
        # A part of the time is kept for the one that may come into question.
        left = max(0.0, seconds - (time.monotonic() - began))
        bench.measure(bench.groups, 0.8 * left)
        fitted = correction(bench.trials())
        another = surprising(exact, bench.known(), fitted, bench.best())
        if another is not None and most is None and time.monotonic() - began < seconds:
            bench.one_more(another, 0.2 * left)
        tried = tuple(bench.tried())
    ranking = [t for t in tried if t.measured is not None]
    chosen, confidence = choose(ranking)
    return TuningResult(
        tried=tried,
        chosen=chosen,
        confidence=confidence,
        correction=correction(bench.trials()),
        seconds=time.monotonic() - began,
    )


# Decisions


def worth_trying(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates worth trying: plain strategies of one process with all threads first, then the best by
    prediction, then plain data_parallel where it is best, and the others of one process with all threads; at last all
    without predictions."""
    ranked = sorted(candidates, key=_seconds_per_example)
    alone = [p for p in candidates if p.strategy.one_process]
    most = max((p.launcher.threads_each(1) for p in alone), default=0)
    all_threads = [p for p in alone if p.launcher.threads_each(1) == most]
    plain = [p for p in all_threads if _is_plain(p)]
    parallel = [p for p in ranked if _is_plain(p) and written_name(type(p.strategy)) == "data_parallel"]
    best = [p for p in ranked if p.cost is not None][:BEST]
    unpriced = [p for p in candidates if p.cost is None]
    return list(_first_of_each([*plain, *best, *parallel[:1], *all_threads, *unpriced]))


def surprising(
    candidates: Sequence[Candidate], known: Iterable[str], fitted: Correction, best: float | None
) -> Candidate | None:
    """Return the fastest untried candidate by the corrected predictions, if it should beat the best measured candidate
    (``best``: that candidate's seconds of an example); else None."""
    named = set(known)
    rest = [(p, p.cost) for p in candidates if str(p) not in named]
    priced = [(i, family(p.strategy), cost) for i, (p, cost) in enumerate(rest) if cost is not None]
    found = [(fitted.step_seconds(name, cost) / cost.examples, i) for i, name, cost in priced]
    if not found or best is None or min(found)[0] >= best:
        return None
    return rest[min(found)[1]][0]


def choose(ranking: Sequence[TuningTrial]) -> tuple[TuningTrial, float]:
    """Choose from the ranking: (the trial to take, how confident one can be that the first is faster than the second).
    A trial that cannot be distinguished from the first, and is as good as equal, may be taken instead: the one with
    the fewest processes, then with the shortest name."""
    first = ranking[0]
    if len(ranking) == 1:
        return first, 1.0
    likes = [other for other in ranking if other is first or _alike(first, other)]
    simplest = min(likes, key=lambda t: (_ranks(t), len(str(t.strategy)), ranking.index(t)))
    assert first.measured is not None
    assert ranking[1].measured is not None
    return simplest, _sure(first.measured, ranking[1].measured)


def _alike(first: TuningTrial, other: TuningTrial) -> bool:
    assert first.measured is not None
    assert other.measured is not None
    ratio = other.measured.seconds_per_example / first.measured.seconds_per_example
    return alike(*_side_by_side(first.measured, other.measured), ratio)


def _sure(first: Measured, second: Measured) -> float:
    """Return how confident one can be that the first is faster."""
    return faster_confidence(*_side_by_side(first, second))


def _side_by_side(first: Measured, second: Measured) -> tuple[list[float], list[float]]:
    """Return the seconds of an example, of the rounds that both candidates made in turns."""
    both = sorted(first.rounds.keys() & second.rounds.keys())
    a, b = ([m.rounds[turn] * len(m.seconds) / m.examples for turn in both] for m in (first, second))
    return a, b


def _ranks(tried: TuningTrial) -> int:
    return tried.measured.candidate.ranks if tried.measured is not None else 0


def _seconds_per_example(candidate: Candidate) -> float:
    return math.inf if candidate.cost is None else candidate.cost.seconds_per_example


def _is_plain(candidate: Candidate) -> bool:
    """Report whether every field of the strategy has its default value."""
    return str(candidate.strategy) == written_name(type(candidate.strategy))


def _first_of_each(candidates: Iterable[Candidate]) -> Iterable[Candidate]:
    seen = set[str]()
    for p in candidates:
        if str(p) not in seen:
            seen.add(str(p))
            yield p


# The processes


class _Bench:
    """The candidates as they are built and measured; their processes end with the stack."""

    def __init__(
        self, stack: ExitStack, workload: Workload | str, changes: Mapping[str, Any], building_until: float
    ) -> None:
        self._stack, self._workload, self._changes, self._until = stack, workload, changes, building_until
        self._given: list[Candidate] = []
        self.groups: list[TrialWorkers] = []
        self._refused: list[tuple[Candidate, Exception]] = []

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Build the candidates in this order, as many as there is time for, and at least two. Raises the error of the
        first one where none can be built."""
        for p in candidates:
            if len(self.groups) < 2 or time.monotonic() < self._until:
                self._add(p)
        if not self.groups and self._refused:
            raise self._refused[0][1]

    def _add(self, chosen: Candidate) -> TrialWorkers | None:
        self._given.append(chosen)
        try:
            group = TrialWorkers(chosen, self._workload, self._changes)
            self._stack.callback(group.pool.close)
            group.built()
        except (ValueError, WorkerFailed) as error:
            self._refused.append((chosen, error))
            return None
        self.groups.append(group)
        return group

    def measure(self, groups: Sequence[TrialWorkers], seconds: float) -> None:
        """Measure the candidates in turns. A candidate that fails is left out; where all fail, the first error is
        raised."""
        waiting = list(groups)
        while waiting:
            try:
                take_turns(waiting, seconds)
                return
            except (ValueError, WorkerFailed) as error:
                failed = next(g for g in waiting if g.failed)
                waiting.remove(failed)
                self.groups.remove(failed)
                self._refused.append((failed.measured.candidate, error))
        if not self.groups:
            raise self._refused[0][1]

    def one_more(self, another: Candidate, seconds: float) -> None:
        """Measure one more candidate beside the best so far."""
        group = self._add(another)
        if group is not None:
            self.measure([min(self.groups[:-1], key=lambda g: g.measured.seconds_per_example), group], seconds)

    def known(self) -> list[str]:
        """Return the names of the candidates that were tried, or refused."""
        return [str(p) for p in self._given]

    def trials(self) -> list[Trial]:
        """Return the trials of all candidates that were both predicted and measured."""
        found = [(g.measured.candidate, g.measured.step_seconds) for g in self.groups]
        return [Trial(family(p.strategy), p.cost, seconds) for p, seconds in found if p.cost is not None]

    def best(self) -> float | None:
        """Return the seconds of an example of the fastest candidate; None where none was measured."""
        return min((g.measured.seconds_per_example for g in self.groups), default=None)

    def tried(self) -> list[TuningTrial]:
        """Return the trials, the fastest first, the refused last."""
        ranked = sorted(self.groups, key=lambda g: g.measured.seconds_per_example)
        found = [_tried(g.measured.candidate, g.measured) for g in ranked]
        return found + [replace(_tried(p, None), refused=_first_line(error)) for p, error in self._refused]


def _tried(candidate: Candidate, measured: Measured | None) -> TuningTrial:
    return TuningTrial(
        strategy=candidate.strategy, launcher=candidate.launcher, predicted=candidate.cost, measured=measured
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
