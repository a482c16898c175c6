"""Finds the ranks that stand still while others go on. Where workers do not wait for each other (a parameter server,
Hogwild) no other notices one that hangs before the end of the run, when all wait for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, final

import numpy as np

from apportion.runtime.supervisor.failures import Notice


@final
class StillRanks:
    """What each rank got done, as the looks of a watchdog see it. A rank is named once, each time that it stands
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
