"""A monitor of whether a run is as fast as expected: the time of its steps beside the expected one, and why it drifts.

A change is reported once: when the steps are 20 % off, again when they are 20 % off what was last reported, and when
they are back within 10 %. Where only a few steps were timed before, or none, it is reported when steps take ten times
as long as those, or as this run's own before, and when they are back within twice the time.

The share of the time in which something on this machine waits for a core is Linux's own count
(Documentation/accounting/psi.rst of its sources). It is not the load: that of the last minute knows little of the last
seconds.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, final

from apportion.core.event import Event

if TYPE_CHECKING:
    from apportion.cost_model.cost import Cost


OFF, BACK = 1.2, 1.1
"""The factors between a step's time and the expected one: a change is reported from the first on, and a return to
normal below the second."""
WINDOW = 7
"""The number of reports of each rank that a median is taken of: about four seconds. It is odd, so that the median never
lies between two speeds."""
ROUGHLY_OFF, ROUGHLY_BACK, FEW = 10.0, 2.0, 3
"""The same where what is expected is rough, and the number of reports of each rank that then suffice."""
BASELINE_STEPS = 3
"""The least number of steps in one report for it to say what steps of this run take: the last batch of an epoch may be
small."""
APART = 1.2
"""The factor by which a rank's own work must take longer than the others' for the rank to be called slow."""
OWN = ("loading", "computing", "updating")
"""The parts of a step that a rank does by itself; it waits for the rest of the step."""
WANTED = 0.15
"""The share of the time in which something waits for a core where other programs run on the cores: two workers of as
many threads as there are cores leave it at a few hundredths."""
_PARTS = {
    "loading": "loading data",
    "computing": "computing",
    "updating": "updating the weights",
    "waiting": "communicating",
}
_LONGER = {
    "loading": "a disk or network that others use, or too few loaders",
    "computing": "something else runs on these cores, or they run at a lower clock",
    "updating": "something else uses the memory",
    "waiting": "something else uses the link or the memory between the ranks",
}
_SHORTER = {
    "loading": "what is read was not in memory yet when it was tried, or others used the disk or network",
    "computing": "something else ran on these cores when it was tried, or they ran at a lower clock",
    "updating": "something else used the memory when it was tried",
    "waiting": "something else used the link or the memory between the ranks when it was tried",
}

Terms = Mapping[str, float]
"""The seconds of a step by ``loading``, ``computing``, ``updating`` and ``waiting``, as ``speed`` events have them."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The time that a step should take."""

    step_seconds: float
    terms: Terms
    measured: bool
    """Was the time measured in a trial? Otherwise it was predicted."""
    rough: bool = False
    """Is it of a few steps alone, so that only much longer ones are reported?"""
    own: bool = False
    """Is it of this run's own steps?"""


@dataclass(frozen=True, kw_only=True)
class SlowdownReport:
    """A report of a change in the time of a step."""

    ratio: float
    """The time that a step takes divided by the time that it should take."""
    step_seconds: float
    cause: str


def expected_of(cost: Cost) -> Expected:
    """Return a prediction in the terms that a run can measure."""
    terms = {name: cost.terms.get(name, 0.0) for name in OWN}
    waiting = cost.step_seconds - sum(terms.values())
    return Expected(step_seconds=cost.step_seconds, terms={**terms, "waiting": waiting}, measured=False)


def drift(
    expected: Expected, ranks: Mapping[int, Terms], last: float = 1.0, *, wanted: float | None = None
) -> SlowdownReport | None:
    """Return what there is to report; None where nothing has changed. ``ranks``: the medians of each rank. ``last``:
    the ratio that was reported last. ``wanted``: the share of the time in which something waits for a core, where that
    is known."""
    steps = {rank: sum(terms.values()) for rank, terms in ranks.items()}
    took = max(steps.values())
    ratio = took / expected.step_seconds
    moved = max(ratio / last, last / ratio)
    off, near = (ROUGHLY_OFF, ROUGHLY_BACK) if expected.rough else (OFF, BACK)
    away = ratio if expected.rough else max(ratio, 1 / ratio)
    back = last != 1.0 and away < near
    if not back and (moved < off or away < off):
        return None
    by = "of steps before" if expected.own else "measured" if expected.measured else "predicted"
    should = (
        f"{expected.step_seconds * 1e3:.3g} ms {by}" if expected.own else f"{by} {expected.step_seconds * 1e3:.3g} ms"
    )
    if back:
        return SlowdownReport(
            ratio=1.0, step_seconds=took, cause=f"a step takes {took * 1e3:.3g} ms, again as the {should}"
        )
    why = _why(expected, ranks, wanted)
    return SlowdownReport(
        ratio=ratio,
        step_seconds=took,
        cause=f"a step takes {took * 1e3:.3g} ms, {ratio:.2f} times the {should}: {why}",
    )


def _why(expected: Expected, ranks: Mapping[int, Terms], wanted: float | None) -> str:
    """Name the part of a step that has changed most, by how much, and what may have changed it."""
    medians = {name: median(terms[name] for terms in ranks.values()) for name in _PARTS}
    longer = {name: seconds - expected.terms.get(name, 0.0) for name, seconds in medians.items()}
    faster = sum(longer.values()) < 0
    slow = _slow_rank(ranks)
    if slow is not None and not faster:
        rank, times = slow
        return (
            f"rank {rank} is slow, its own work takes {times:.2f} times the others' and they wait for it: something "
            "else runs on its cores"
        )
    part = (min if faster else max)(longer, key=lambda name: longer[name])
    changed = f"{_PARTS[part]} takes {_times(medians[part], expected.terms.get(part, 0.0))}"
    if faster:
        return f"{changed}: {_SHORTER[part] if expected.measured else 'the prediction was too high'}"
    return f"{changed}: {_LONGER[part] if part != 'computing' or wanted is None else _cores(wanted)}"


def _cores(wanted: float) -> str:
    """Say why computing takes longer, where it is known how often something waits for a core."""
    waits = f"something waits for a core {wanted:.0%} of the time"
    if wanted < WANTED:
        return f"these cores run at a lower clock, or share memory with another machine's; {waits}"
    return f"something else runs on these cores; {waits}"


def _slow_rank(ranks: Mapping[int, Terms]) -> tuple[int, float] | None:
    """Return (the rank that the others wait for, how many times as long its own work takes); None where no rank is
    slow."""
    own = {rank: sum(terms[name] for name in OWN) for rank, terms in ranks.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = [seconds for rank, seconds in own.items() if rank != slowest]
    if not others or own[slowest] < APART * median(others):
        return None
    return slowest, own[slowest] / max(median(others), 1e-9)


def _times(now: float, then: float) -> str:
    """Compare the seconds that a part takes with the seconds that it should take, in words."""
    if then < 0.05 * now:
        return f"{now * 1e3:.3g} ms a step more than it should"
    return f"{now / then:.2f} times as long, {now * 1e3:.3g} ms instead of {then * 1e3:.3g} ms"


CPU = Path("/proc/pressure/cpu")


def cores_wanted(path: Path = CPU) -> float | None:
    """Return the share of the last ten seconds in which something that could have run waited for a core; None where the
    system does not tell."""
    try:
        found = re.search(r"^some avg10=([\d.]+)", path.read_text(), re.MULTILINE)
    except OSError:  # an older kernel, or another one
        return None
    return None if found is None else float(found[1]) / 100


@final
class PerformanceMonitor:
    """Compares the events of a run with what was expected of it."""

    def __init__(self, expected: Expected | None, *, wanted: Callable[[], float | None] = cores_wanted) -> None:
        """Watch for changes from what was expected, or, where nothing was, from what this run's own steps took.
        ``wanted``: called where there is something to report, see ``drift``."""
        self._expected = expected
        self._wanted = wanted
        self._seen: dict[int, deque[Terms]] = {}
        self._begun = dict[int, int]()
        """The step of each rank's latest report."""
        self._last = 1.0

    def take(self, event: Event) -> Event | None:
        """Take one more event; return a ``drift`` event where there is something to report, else None."""
        if event.kind == "fault":
            self._seen.clear()  # the step under way was made again
            self._begun.clear()
            if event.data["action"].startswith("goes on with ") and "worker" in event.data["action"]:
                self._expected = None  # that was of more workers
                self._last = 1.0
        if event.kind != "speed":
            return None
        rank = event.data["rank"]
        before = self._begun.get(rank)
        self._begun[rank] = event.step
        if before is None:  # a first step sets up what the others use
            return None
        terms = {name: event.data[name] for name in _PARTS}
        window = FEW if self._expected is None or self._expected.rough else WINDOW
        self._seen.setdefault(rank, deque(maxlen=WINDOW)).append(terms)
        self._learn(terms, event.step - before)
        if self._expected is None or rank != max(self._seen) or any(len(s) < window for s in self._seen.values()):
            return None
        return self._reported(event, self._expected, window)

    def _learn(self, terms: Terms, steps: int) -> None:
        """Take this run's own steps for what steps should take, where nothing else is known, or these are faster than
        what is known roughly."""
        known, took = self._expected, sum(terms.values())
        if steps < BASELINE_STEPS or took <= 0 or (known is not None and not known.rough):
            return
        if known is None or (took < known.step_seconds and self._last == 1.0):
            self._expected = Expected(step_seconds=took, terms=terms, measured=True, rough=True, own=True)

    def _reported(self, event: Event, expected: Expected, window: int) -> Event | None:
        medians = {
            rank: {name: median(terms[name] for terms in [*seen][-window:]) for name in _PARTS}
            for rank, seen in self._seen.items()
        }
        found = drift(expected, medians, self._last)
        if found is None:
            return None
        found = drift(expected, medians, self._last, wanted=self._wanted()) or found
        self._last = found.ratio
        data = {
            "cause": found.cause,
            "ratio": found.ratio,
            "step_seconds": found.step_seconds,
            "expected_seconds": expected.step_seconds,
        }
        return replace(event, kind="drift", data=data)
