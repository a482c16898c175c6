"""One record of a script that was run twice, the second time to go on from what the first run has saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from apportion.script_check.record import Event, RankRecord

_ENDS = ("end", "destroy", "destroyed")


def joined_runs(first: Sequence[RankRecord], second: Sequence[RankRecord]) -> list[RankRecord]:
    """Returns for each rank the events of both runs as those of one, with an event ``restart`` between them: steps,
    iterations and collectives are counted on."""
    return [
        RankRecord(one.rank, tuple(_events(one, other)), runs=(one, other))
        for one, other in zip(first, second, strict=True)
    ]


def runs(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Returns the records of each run of a script by itself: one list where it was run once."""
    return [list(found) for found in zip(*(record.runs or (record,) for record in records), strict=True)]


def _events(first: RankRecord, second: RankRecord) -> Iterator[Event]:
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
