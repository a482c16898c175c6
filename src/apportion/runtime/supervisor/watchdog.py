"""Finds late workers: what the supervisor sees of its workers from outside, by a clock of its own looks.

Time in which nothing was looked at (the driver was stopped, or the whole machine) does not count, so it makes no worker
late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from apportion.runtime.supervisor.failures import Notice, WorkerStalled
from apportion.runtime.worker.progress import Progress

LOOK_SECONDS = 0.5
"""The seconds between two looks at every rank's progress."""
LATE_SECONDS, LATE_STEPS, LATE_FIRST = 30.0, 20, 2
"""A rank is late after others have waited for it LATE_SECONDS, or LATE_STEPS times the slowest step so far, or
LATE_FIRST times the first one, which may have compiled the network: whichever is most."""
FIRST_SECONDS = 900.0
"""The seconds that may pass before anything moves: data sets are opened, networks compiled."""
STOPPED_SECONDS, STOPPED_STEPS = 1.0, 8
"""A rank whose process is stopped is taken for dead after STOPPED_SECONDS, or STOPPED_STEPS median steps, whichever is
more: with the look that finds it, within 2 s or 10 median steps."""
SILENT_SECONDS, SILENT_STEPS = 2.0, 10
"""A rank that does not answer when another is lost, and gets nothing done, is taken for dead after SILENT_SECONDS, or
SILENT_STEPS median steps, whichever is more."""
SILENT_SLOWEST = 1.5
"""A silent rank also has this many times the longest that anything has taken so far: a batch of an evaluation may take
longer than ten steps."""
_DONE, _WAITING, _STEP, _BEGUN = (
    word.index for word in (Progress.beats, Progress.waiting, Progress.step, Progress.begun)
)


class LookClock:
    """Measures the seconds between two looks; counts at most the time that two looks may take."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def passed(self, now: float) -> float:
        """Returns the seconds since the last call."""
        # A longer gap says that this process did not run: SIGSTOP, a laptop that slept, a machine that swaps. The
        # workers may not have run either, and none is blamed for that time.
        seconds = min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        return seconds


class Allowance:
    """A number of seconds that may be spent; time in which nothing was looked at does not count."""

    def __init__(self, seconds: float) -> None:
        self._left, self._clock = seconds, LookClock()

    @property
    def left(self) -> float:
        """The seconds that are left now; negative once the time has passed."""
        self._left -= self._clock.passed(time.monotonic())
        return self._left


@final
class Watchdog:
    """Finds the ranks that the others wait for, from the progress line of each slot: what it got done, and whether it
    waits."""

    def __init__(self, lines: Any) -> None:
        self._all = lines
        self._clock = LookClock()
        self._first: float | None = None
        self._slowest = 0.0
        self._steps: deque[float] = deque(maxlen=50)
        self._notices: list[Notice] = []
        self.assign_slots(range(len(lines)))

    def assign_slots(self, slots: Sequence[int]) -> None:
        """Puts these slots into the run from now on, in the order of their ranks."""
        self._slots = list(slots)
        self._seen = self._lines[:, _DONE]
        self._still = self._waited = 0.0
        """The seconds since something moved, and the seconds of these while a rank waited."""
        self._alone = StillRanks(self._seen, LATE_SECONDS, LATE_STEPS, LATE_FIRST, FIRST_SECONDS)
        self._stopped = np.zeros(len(self._slots))
        """The seconds that each rank's process has been stopped while another's ran."""

    @property
    def _lines(self) -> Any:
        """A copy of the progress lines, by rank."""
        return self._all[self._slots]

    @property
    def step(self) -> int:
        """The number of updates that have been made."""
        return int(self._lines[:, _STEP].max())

    def step_of(self, slot: int) -> int:
        """Returns the number of updates that the worker in this slot has seen made."""
        return int(self._all[slot, _STEP])

    @property
    def begun(self) -> bool:
        """True where every rank is in its loop."""
        return bool(self._lines[:, _BEGUN].all())

    @property
    def pace(self) -> float:
        """The median of the last steps, in seconds; 0 before the first ones."""
        return float(np.median(self._steps)) if self._steps else 0.0

    def reset(self, slot: int) -> None:
        """Clears a slot's marks for another process, which takes the slot."""
        self._all[slot, [_WAITING, _BEGUN]] = 0

    def late(self, now: float, stopped: Collection[int] = (), excused: Collection[int] = ()) -> WorkerStalled | None:
        """Returns the ranks that have kept the others waiting for too long, or None. ``stopped``: the ranks whose
        processes are stopped; ``excused``: those that cannot be heard, or that are done."""
        passed = self._clock.passed(now)
        self._still += passed
        found = self._too_long_stopped(passed, stopped)
        if found is not None:
            return found
        lines = self._lines
        done, waiting = lines[:, _DONE], lines[:, _WAITING] != 0
        for rank in self._alone.update(
            passed, done, waiting | (lines[:, _BEGUN] == 0), [*stopped, *excused], self._still
        ):
            self._notices.append(self._alone.notice(rank, int(lines[rank, _STEP])))
        if (done != self._seen).any():
            self._note_progress(done)
            return None
        # Only time in which some rank waits counts: where all compute, a step is long, and no rank is late.
        self._waited = self._waited + passed if waiting.any() else 0.0
        if self._waited <= self._allowed():
            return None
        # Those that do not wait are what the others wait for. Where all wait, each for another, all are late: a
        # deadlock.
        late = np.flatnonzero(~waiting).tolist() or list(range(len(done)))
        return WorkerStalled(tuple(late), self.step, self._waited)

    def notices(self) -> list[Notice]:
        """Returns what the user is to know, since the last call, of ranks that stand still while others go on."""
        notices, self._notices = self._notices, []
        return notices

    def _too_long_stopped(self, passed: float, stopped: Collection[int]) -> WorkerStalled | None:
        if not stopped and not self._stopped.any():
            return None
        for rank in range(len(self._stopped)):
            # Where all are stopped, someone has stopped the run as a whole.
            others_run = len(stopped) < len(self._stopped)
            self._stopped[rank] = self._stopped[rank] + passed if rank in stopped and others_run else 0.0
        ranks = np.flatnonzero(self._stopped > self._pace(STOPPED_SECONDS, STOPPED_STEPS)).tolist()
        if not ranks:
            return None
        return WorkerStalled(tuple(ranks), self.step, float(self._stopped.max()), stopped=True)

    def _note_progress(self, done: Any) -> None:
        if self._first is None:
            self._first = self._still
        else:
            self._slowest = max(self._slowest, self._still)
            self._steps.append(self._still / max(1, int((done - self._seen).max())))
        self._seen, self._still, self._waited = done, 0.0, 0.0

    def _allowed(self) -> float:
        if self._first is None:
            return FIRST_SECONDS
        return max(LATE_SECONDS, LATE_STEPS * self._slowest, LATE_FIRST * self._first)

    def _pace(self, seconds: float, steps: int) -> float:
        return max(seconds, steps * self.pace)

    def silence(self) -> UnresponsiveDetector:
        """Returns a detector of ranks that are unresponsive from now on."""
        usual = max(self._pace(SILENT_SECONDS, SILENT_STEPS), SILENT_SLOWEST * self._slowest)
        patience = FIRST_SECONDS if self._first is None else usual
        return UnresponsiveDetector(lambda: self._lines, patience, max(patience, self._allowed()))


@final
class UnresponsiveDetector:
    """Finds the ranks that neither answer nor get anything done: for ``patience`` seconds, or ``opening`` where they
    still open the workload and have no wait to be called out of."""

    def __init__(self, look: Callable[[], Any], patience: float, opening: float) -> None:
        self._look, self._patience, self._opening = look, patience, opening
        lines = look()
        self._seen = lines[:, [_DONE, _BEGUN]]
        self._clock = LookClock()
        self._still = np.zeros(len(lines))

    def broken_by(self, asked: Collection[int], now: float) -> WorkerStalled | None:
        """Returns those of the ranks ``asked``, which have not answered yet, that will not answer, or None."""
        lines = self._look()
        self._still += self._clock.passed(now)
        seen = lines[:, [_DONE, _BEGUN]]
        self._still[(seen != self._seen).any(1)] = 0.0
        self._seen = seen
        patience = np.where(lines[:, _BEGUN] != 0, self._patience, self._opening)
        silent = [rank for rank in asked if self._still[rank] > patience[rank]]
        if not silent:
            return None
        return WorkerStalled(tuple(silent), int(lines[:, _STEP].max()), float(self._still[silent].max()), silent=True)


def memory_kills() -> int:
    """Returns how many processes the kernel has killed for memory, as far as this process can see."""
    return sum(map(_kills_in, _memory_counters()))


def _kills_in(path: str) -> int:
    try:
        entries = dict(line.split() for line in Path(path).read_text().splitlines())
        return int(entries["oom_kill"])
    except (OSError, ValueError, KeyError):
        return 0


def _memory_counters() -> Iterator[str]:
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield f"/sys/fs/cgroup{path}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory{path}/memory.oom_control"
    except (OSError, ValueError):
        pass
    yield "/sys/fs/cgroup/memory.events"
    yield "/proc/vmstat"


@final
class StillRanks:
    """Finds the ranks that stand still while others go on. Where workers do not wait for each other (a parameter
    server, Hogwild) no other rank notices one that hangs before the end of the run, when all wait for it.

    What each rank got done, as the looks of a watchdog see it. A rank is named once, each time that it stands
    still."""

    def __init__(self, done: Any, seconds: float, steps: int, first: int, opening: float) -> None:
        """Take what each rank has got done so far. A rank may stand still for ``seconds``, ``steps`` times its own
        slowest step, or ``first`` times its first one, whichever is most; while its pace is not known, for
        ``opening`` seconds."""
        self._seen, self._limits, self._opening = done, (seconds, steps, first), opening
        self._still = np.zeros(len(done))
        self._first = np.full(len(done), np.nan)
        """The seconds of the first step that was seen whole; before it nothing is known of a rank's pace."""
        self._slowest = np.zeros(len(done))
        self._moved = np.zeros(len(done), dtype=bool)
        """Which ranks have made a step: servers make none."""
        self._named = np.zeros(len(done), dtype=bool)

    def update(self, passed: float, done: Any, waiting: Any, others: Collection[int], all_still: float) -> list[int]:
        """Return the ranks to name now. ``waiting``: which ranks wait for others, or have not begun; ``others``: the
        ranks that may stand still for another reason; ``all_still``: the seconds since any of them got something
        done."""
        moved = done != self._seen
        excused = waiting.copy()
        excused[list(others)] = True
        whole = moved & self._moved  # the time before the first move includes what was opened
        self._first = np.where(whole & np.isnan(self._first), self._still, self._first)
        self._slowest = np.where(whole, np.maximum(self._slowest, self._still), self._slowest)
        self._still = np.where(moved | excused, 0.0, self._still + passed)
        self._named &= ~(moved | excused)
        self._moved |= moved
        self._seen = done
        all_still = 0.0 if moved.any() else all_still
        seconds, steps, first = self._limits
        allowed = np.maximum(np.maximum(seconds, steps * self._slowest), first * self._first)
        allowed = np.where(np.isnan(self._first), np.where(self._moved, self._opening, np.inf), allowed)
        # Where the others stand still, too, they wait for it, or all of them for something else.
        found = (self._still > allowed) & (all_still < self._still / 2) & ~self._named
        self._named |= found
        return [int(rank) for rank in np.flatnonzero(found)]

    def notice(self, rank: int, step: int) -> Notice:
        """Return what the user is to know of a rank that was found."""
        cause = (
            f"rank {rank} has not moved for {self._still[rank]:.0f} s at step {step}, while others went on: an "
            "environment or a loader that hangs, or a file system that does not answer; its Python stacks are on "
            "standard error"
        )
        return Notice(rank, cause, "the others go on, and wait for it at the end")
