"""The time in which a process could have gone on and had no core, because another program had it."""

from __future__ import annotations

import os
import time

NOTED = 0.05
"""The share of the time without a core above which a measurement is said to have been disturbed."""


def without_core() -> float:
    """Returns the seconds so far in which a thread of this process could have gone on and had no core; 0 where the
    system does not tell (Linux does)."""
    waited = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/schedstat") as file:
                waited += int(file.read().split()[1])
    except (OSError, IndexError, ValueError):  # no such file; or a thread has just ended
        pass
    return waited / 1e9


class Waited:
    """Measures the share of the time since it was made in which the process had no core."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), without_core()

    def share(self) -> float:
        """Return the share of the time since this was made, from 0 to 1."""
        took = time.perf_counter() - self._began
        return min(1.0, max(0.0, without_core() - self._before) / took) if took > 0 else 0.0


def noted(share: float) -> str | None:
    """Returns a sentence on measurements of which this share had no core; None where the share is too small for one."""
    if share <= NOTED:
        return None
    return (
        f"other programs held the cores for {share:.0%} of the time while this was measured, and the figures may be "
        "off by as much: measure again on a quiet machine with remeasure=True"
    )
