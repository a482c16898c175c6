"""Dynamic batching: pure decisions on how many requests a member computes at once, from how long batches have taken and
how long requests can wait.

An idle member takes the requests that wait for it, and does not wait for more. Among the sizes whose batches end in
time, the one with the most rows a second is taken; rows that can no longer be in time are computed by themselves, as
fast as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WEIGHT = 0.2
"""The weight of the newest batch in the running mean of the seconds that batches of its size take."""
LARGE = 32
"""The number of rows above which times are kept by powers of two."""
GAIN = 1.05
"""The factor by which a larger batch must compute more rows a second to be worth its delay."""
LEAST_USUAL = 1e-3
"""The least seconds that a batch is taken to need: shorter times depend on whatever else the machine does."""
SLOWDOWN_WEIGHT = 0.3
"""The weight of the newest batch in ``ServiceTimes.slowdown``: one that had to wait for a core says little."""


@dataclass(slots=True)
class Pace:
    """The seconds that batches take, by their rows: measured when the member was loaded, and updated with every
    batch."""

    seconds: dict[int, float] = field(default_factory=dict)

    def took(self, rows: int, seconds: float) -> None:
        """Record the seconds that a batch of this size took."""
        # Above LARGE rows sizes are rounded up to powers of two, which bounds the number of entries and lets sizes that
        # seldom occur share their measurements.
        rows = rows if rows <= LARGE else 1 << (rows - 1).bit_length()
        if rows < 1:
            return
        known = self.seconds.get(rows)
        self.seconds[rows] = seconds if known is None else known + WEIGHT * (seconds - known)

        # A size that was slow once is not tried again by itself: it cannot be slower than smaller ones that make it up.
        for more in self.seconds:
            if more > rows:
                self.seconds[more] = min(self.seconds[more], self.seconds[rows] * more / rows)

    def expected(self, rows: int) -> float:
        """Return the expected seconds: linear between known sizes, in proportion to the rows beyond them, 0 where none
        is known."""
        if not self.seconds:
            return 0.0
        known = sorted(self.seconds.items())
        if rows <= known[0][0]:
            return known[0][1]
        for (low, before), (high, after) in pairwise(known):
            if rows <= high:
                return before + (after - before) * (rows - low) / (high - low)
        return known[-1][1] * rows / known[-1][0]


@dataclass(slots=True)
class ServiceTimes:
    """The seconds that a member's batches take now, against those that they took when the member was loaded."""

    pace: Pace = field(default_factory=Pace)
    usual: Pace = field(default_factory=Pace)
    """The seconds that batches took when the member was timed by itself as the server was started."""
    slowdown: float = 1.0
    """The factor by which the latest batches took longer than usual."""

    def restarted(self, measured: Iterable[tuple[int, float]]) -> None:
        """Begin with another process, for which (rows, seconds) have been measured."""
        for rows, seconds in measured:
            self.pace.seconds[rows] = self.usual.seconds[rows] = seconds
        self.slowdown = 1.0

    def took(self, rows: int, seconds: float) -> None:
        """Record the seconds that a batch of this size took to be computed."""
        self.pace.took(rows, seconds)
        slowdown = seconds / max(self.usual.expected(rows), LEAST_USUAL)
        self.slowdown += SLOWDOWN_WEIGHT * (slowdown - self.slowdown)


def batch_size(waiting: Sequence[tuple[int, float]], now: float, pace: Pace, most_rows: int) -> int:
    """Return how many of the waiting requests, (rows, deadline) in their order, to compute at once: 1 at least. A
    request of more rows than ``most_rows`` is computed by itself."""
    rows, earliest = waiting[0]
    best, best_rate = 1, rows / max(pace.expected(rows), 1e-9)
    for count, (more, deadline) in enumerate(waiting[1:], start=2):
        rows, earliest = rows + more, min(earliest, deadline)
        seconds = pace.expected(rows)
        # Deadlines only get earlier and batches longer as requests are added: once a batch cannot be in time, no longer
        # one can.
        if rows > most_rows or now + seconds > earliest:
            break
        if rows / max(seconds, 1e-9) >= GAIN * best_rate or seconds == 0.0:
            best, best_rate = count, rows / max(seconds, 1e-9)
    return best
