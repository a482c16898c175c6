"""A thread that calls a function at a time of ``time.monotonic``, unless it is set to another time before.

The deadline that it watches changes every few milliseconds and seldom passes. So the thread is not woken for
a later time, or of none: it wakes at the time it knew, looks, and sleeps on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """An alarm that is set to one time after another. ``ring`` is called in the thread; what it does must be quick."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at = float("inf")
        self._sleeps_until = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)
        self._thread.start()

    def set(self, at: float) -> None:
        """Set the time at which to ring, in the place of the one before."""
        with self._changed:
            self._at = at
            if at < self._sleeps_until:
                self._changed.notify()

    def clear(self) -> None:
        """Set no time. Once this has returned, the alarm has rung or will not."""
        with self._changed:
            self._at = float("inf")

    def close(self) -> None:
        """Stop the thread, which has ended afterwards."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                left = self._at - time.monotonic()
                if left <= 0.0:
                    self._at = float("inf")
                    self._ring()
                    continue
                self._sleeps_until = self._at
                self._changed.wait(None if left == float("inf") else min(left, threading.TIMEOUT_MAX))
                self._sleeps_until = 0.0
