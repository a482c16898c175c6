"""A monitor of whether a run is as fast as expected: the time of its steps beside the expected one, and why it drifts.

A change is reported once: when the steps are 20 % off, again when they are 20 % off what was last reported, and when
they are back within 10 %.

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
    back = last != 1.0 and max(ratio, 1 / ratio) < BACK
    if not back and (moved < OFF or max(ratio, 1 / ratio) < OFF):
        return None
    should = f"{'measured' if expected.measured else 'predicted'} {expected.step_seconds * 1e3:.3g} ms"
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

    def __init__(self, expected: Expected, *, wanted: Callable[[], float | None] = cores_wanted) -> None:
        """Watch for changes from what was expected. ``wanted``: called where there is something to report, see
        ``drift``."""
        self._expected: Expected | None = expected
        self._wanted = wanted
        self._seen: dict[int, deque[Terms]] = {}
        self._begun = set[int]()
        self._last = 1.0

    def take(self, event: Event) -> Event | None:
        """Take one more event; return a ``drift`` event where there is something to report, else None."""
        if event.kind == "fault":
            self._seen.clear()  # the step under way was made again
            self._begun.clear()
            if event.data["action"].startswith("goes on with ") and "worker" in event.data["action"]:
                self._expected = None  # that was of more workers
        if event.kind != "speed" or self._expected is None:
            return None
        rank = event.data["rank"]
        if rank not in self._begun:  # a first step sets up what the others use
            self._begun.add(rank)
            return None
        terms = {name: event.data[name] for name in _PARTS}
        self._seen.setdefault(rank, deque(maxlen=WINDOW)).append(terms)
        if any(len(seen) < WINDOW for seen in self._seen.values()) or rank != max(self._seen):
            return None
        return self._told(event, self._expected)

    def _told(self, event: Event, expected: Expected) -> Event | None:
        medians = {
            rank: {name: median(terms[name] for terms in seen) for name in _PARTS} for rank, seen in self._seen.items()
        }
        found = drift(expected, medians, self._last)
        if found is None:
            return None
        self._last = found.ratio
        data = {
            "cause": found.cause,
            "ratio": found.ratio,
            "step_seconds": found.step_seconds,
            "expected_seconds": expected.step_seconds,
        }
        return replace(event, kind="drift", data=data)
