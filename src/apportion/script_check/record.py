"""What one rank of a script has recorded: a stream of events in a file, and the questions that comparisons ask of it.

Each event is a dict with ``kind`` and ``step``, the number of optimizer steps that the rank had completed, and the
fields of its kind; tensors are numpy arrays. A process that is killed leaves all events but the one it was writing. A
script that was run twice, the second time to go on from what the first run has saved, has one record of both.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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


_ENDS = ("end", "destroy", "destroyed")


def joined_runs(first: Sequence[RankRecord], second: Sequence[RankRecord]) -> list[RankRecord]:
    """Returns for each rank the events of both runs as those of one, with an event ``restart`` between them: steps,
    iterations and collectives are counted on."""
    return [
        RankRecord(one.rank, tuple(_joined_events(one, other)), runs=(one, other))
        for one, other in zip(first, second, strict=True)
    ]


def runs(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Returns the records of each run of a script by itself: one list where it was run once."""
    return [list(found) for found in zip(*(record.runs or (record,) for record in records), strict=True)]


def _joined_events(first: RankRecord, second: RankRecord) -> Iterator[Event]:
    steps = len(first.steps)
    made = Counter(step["optimizer"] for step in first.steps)
    iterations = Counter(event["loader"] for event in first.events_of("iteration"))
    calls = 1 + max((event["call"] for event in first.events if "call" in event), default=-1)
    yield from (event for event in first.events if event["kind"] not in _ENDS)
    yield {"kind": "restart", "step": steps}
    for event in second.events:
        moved = {**event, "step": event["step"] + steps}
        kind = event["kind"]
        if kind in ("step", "contributions"):
            moved["number"] += made[event["optimizer"]]
        elif kind == "iteration":
            moved |= {"number": event["number"] + iterations[event["loader"]], "made": event["made"] + steps}
        elif "iteration" in event:
            moved["iteration"] += iterations[event["loader"]]
        if "call" in event:
            moved["call"] += calls
        yield moved
