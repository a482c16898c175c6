"""What the driver of a run on several hosts has seen of it and rank 0 has not: it is sent to rank 0, which writes the
record of the run, until rank 0 has reported that it is written.

Rank 0 may be lost meanwhile, and another one takes its place. What has not been reported as written is sent again, and
what is left at the end is written by the agent of rank 0's host.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, final

from apportion.core.event import Event

AGAIN_SECONDS = 2.0
"""The seconds until what has not been reported as written is sent again, which double each time."""
MOST_AGAIN_SECONDS = 32.0
"""The most of these seconds: a rank 0 that is busy has to take each copy, and one that is stopped reads none."""
MOST_WAITING = 10_000
"""The largest number of samples that wait: faults, and the end, are kept whatever their number."""
_SAMPLES = {"speed", "rollouts"}


@final
class DriverRecord:
    """The events that are to be written, each with its number, until they are."""

    def __init__(self) -> None:
        self._waiting: dict[int, Event] = {}
        self._number = 0
        self._sent, self._pause = 0.0, AGAIN_SECONDS

    def add(self, event: Event) -> dict[str, Any] | None:
        """Adds an event, and returns the order that sends it; None where it is left out, since too many wait."""
        if event.kind in _SAMPLES and len(self._waiting) > MOST_WAITING:
            return None
        if not self._waiting:
            self._sent = time.monotonic()
        self._number += 1
        self._waiting[self._number] = event
        return _note_order([(self._number, event)])

    def note_written(self, numbers: Iterable[int]) -> None:
        """Notes what rank 0 has reported as written."""
        for number in numbers:
            self._waiting.pop(number, None)
        self._sent, self._pause = time.monotonic(), AGAIN_SECONDS

    def overdue_order(self) -> dict[str, Any] | None:
        """Returns the order that sends all that waits once more, where it has waited for long; else None."""
        if not self._waiting or time.monotonic() - self._sent < self._pause:
            return None
        self._sent, self._pause = time.monotonic(), min(2 * self._pause, MOST_AGAIN_SECONDS)
        return _note_order(self._waiting.items())

    def take_rest(self) -> list[Event]:
        """Returns what has not been reported as written, and forgets it."""
        found, self._waiting = list(self._waiting.values()), {}
        return found


def _note_order(events: Iterable[tuple[int, Event]]) -> dict[str, Any]:
    return {"kind": "note", "events": [{"number": number, "event": asdict(event)} for number, event in events]}
