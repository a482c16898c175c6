"""What one rank of a script has recorded: a stream of events in a file, and the questions that comparisons ask of it.

Each event is a dict with ``kind`` and ``step``, the number of optimizer steps that the rank had completed, and the
fields of its kind; tensors are numpy arrays. A process that is killed leaves all events but the one it was writing.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded, in order."""

    rank: int
    events: tuple[Event, ...] = ()
    runs: tuple[RankRecord, ...] = field(default=(), compare=False)
    """The records of the runs that ``events`` joins, where there were two."""

    def events_of(self, *kinds: str) -> list[Event]:
        """Returns the events of some kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]

    @cached_property
    def steps(self) -> list[Event]:
        """The optimizer steps, in order."""
        return self.events_of("step")

    @cached_property
    def outcome(self) -> Event | None:
        """How the script ended: the event ``end``; None where the process ended before it could write it. A process
        that dies, or does not go on, as it takes down the group of all ranks has done its work: gloo aborts or hangs
        there now and then."""
        ends = self.events_of("end", "destroy", "destroyed")
        if ends and ends[-1]["kind"] == "destroy":
            return {**ends[-1], "kind": "end", "how": "ended"}
        return ends[-1] if ends and ends[-1]["kind"] == "end" else None


def read_records(folder: Path) -> list[RankRecord]:
    """Returns what the ranks of a pass have recorded in a folder, by rank."""
    found = [RankRecord(int(path.stem.removeprefix("rank")), _events(path)) for path in folder.glob("rank*.pkl")]
    return sorted(found, key=lambda record: record.rank)


def _events(path: Path) -> tuple[Event, ...]:
    events = list[Event]()
    with path.open("rb") as file:
        while True:
            try:
                events.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # the end, or an event that a killed process did not finish
                return tuple(events)
