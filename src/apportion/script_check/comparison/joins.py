"""The steps of ranks that torch's ``Join`` lets have different numbers of batches, numbered as the steps of all
ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from apportion.script_check.record import Event, RankRecord


def aligned(ranks: Sequence[RankRecord]) -> Sequence[RankRecord]:
    """Returns the records with the numbers that their steps have on a rank that makes all of them.

    The ranks begin each use of ``Join`` together. A rank that has no more batches leaves out the last steps in it, and
    the first one after it has the number of the others' first one. Records without ``Join``, or with
    different numbers of uses of it, are returned as they are.
    """
    counts = [_steps_by_use(record) for record in ranks]
    uses = {len(record.events_of("join")) for record in ranks}
    if len(uses) != 1 or 0 in uses or all(each == counts[0] for each in counts):
        return ranks
    return [_numbered(record, own, counts) for record, own in zip(ranks, counts, strict=True)]


def _steps_by_use(record: RankRecord) -> list[Counter[int]]:
    """The number of steps of each optimizer before the first use of ``Join``, and from each use to the next."""
    found = [Counter[int]()]
    for event in record.events_of("join", "step"):
        if event["kind"] == "join":
            found.append(Counter())
        else:
            found[-1][event["optimizer"]] += 1
    return found


def _numbered(record: RankRecord, own: Sequence[Counter[int]], counts: Sequence[Sequence[Counter[int]]]) -> RankRecord:
    left_out, use = defaultdict[int, int](int), 0
    events = list[Event]()
    for event in record.events:
        if event["kind"] == "join":
            for optimizer in {name for each in counts for name in each[use]}:
                left_out[optimizer] += max(each[use][optimizer] for each in counts) - own[use][optimizer]
            use += 1
        changed = {**event, "step": event["step"] + sum(left_out.values())}
        if event["kind"] in ("step", "contributions"):
            changed["number"] = event["number"] + left_out[event["optimizer"]]
        events.append(changed)
    return replace(record, events=tuple(events))
