"""Events of a run that another process has seen, on their way into the record that this one writes."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any, final

from apportion.core.event import Event


@final
class OutsideEvents:
    """Events that are given from one thread and recorded in another. Each has a number, by which one that is given
    twice, since its giver has not heard that it was recorded, is recorded once."""

    def __init__(self) -> None:
        self._given = queue.SimpleQueue[tuple[int, Event]]()
        self._seen: set[int] = set()
        self._recorded: list[int] = []

    def give(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Gives events, each a mapping of ``number`` and ``event``, its fields; from any thread."""
        for given in events:
            self._given.put((given["number"], Event(**given["event"])))

    def take(self) -> list[tuple[int, Event]]:
        """Returns what was given since the last call, in the order of its numbers."""
        found: dict[int, Event] = {}
        while not self._given.empty():
            number, event = self._given.get()
            if number not in self._seen:
                found[number] = event
        self._seen.update(found)
        return sorted(found.items(), key=lambda item: item[0])

    def note(self, number: int) -> None:
        """Notes that an event is in the record."""
        self._recorded.append(number)

    def recorded(self) -> list[int]:
        """Returns the numbers of what has been recorded since the last call."""
        found, self._recorded = self._recorded, []
        return found
