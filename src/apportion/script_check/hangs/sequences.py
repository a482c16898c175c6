"""The collectives of each rank in order, group by group, and what a rank is inside of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.script_check.record import Event, RankRecord

KINDS = ("collective", "recorder_collective")
Sequences = Mapping[str, Mapping[int, Sequence[Event]]]
"""The calls of each rank in each group, in order, by group and rank."""


@dataclass(frozen=True)
class Waiting:
    """The call that a rank is inside of, or waits for. ``call``: its event ``collective``; None for a work handle that
    no recorded function has returned. ``site``, ``line``: where the rank waits, and ``time``: since when."""

    call: Event | None
    site: str
    line: str
    time: float


def sequences(records: Sequence[RankRecord]) -> Sequences:
    """Returns the calls in each group, by rank; also for a rank of the group that has made none."""
    found = defaultdict[str, dict[int, list[Event]]](dict)
    for record in records:
        for event in record.events_of(*KINDS):
            if event["sequence"] is not None:
                for rank in event["ranks"]:
                    found[event["group"]].setdefault(rank, [])
                found[event["group"]][record.rank].append(event)
    return found


def begun_call(record: RankRecord) -> Waiting | None:
    """Returns what a rank is inside of: the last call, or wait for one, that has begun and not ended; None where the
    rank is in code of its own, or has ended."""
    if record.outcome is not None:
        return None
    calls = {event["call"]: event for event in record.events_of(*KINDS)}
    ended = {event["call"] for event in record.events_of("collective_end")}
    open_waits = list[Event]()
    for event in record.events_of("wait", "wait_end"):
        if event["kind"] == "wait":
            open_waits.append(event)
        elif open_waits:
            open_waits.pop()
    if open_waits and open_waits[-1]["call"] not in ended:
        wait = open_waits[-1]
        return Waiting(calls.get(wait["call"]), wait["site"], wait["line"], wait["time"])
    inside = [event for number, event in calls.items() if number not in ended and not event["pending"]]
    if not inside:
        return None
    last = inside[-1]
    return Waiting(last, last["site"], last["line"], last["time"])


def messages(record: RankRecord, op: str) -> list[Event]:
    """Returns the messages that a rank has begun to send, or to receive (``op``: "send" or "recv"), in order."""
    return [
        event for event in record.events_of("collective") if event["sequence"] is None and event["op"].startswith(op)
    ]


def gone_past(record: RankRecord, event: Event) -> bool:
    """Returns whether a rank has completed a call."""
    return any(end["call"] == event["call"] and "error" not in end for end in record.events_of("collective_end"))
