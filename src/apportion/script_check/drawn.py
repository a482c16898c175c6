"""The random numbers that the ranks drew: what one process has to draw in order to compute the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from apportion.script_check.comparison.reading import reading
from apportion.script_check.record import RankRecord


def draws_of_ranks(records: Sequence[RankRecord]) -> dict[str, list[list[Any]]]:
    """Returns the numbers that each rank drew at each place, in order, but for those of rows."""
    found = dict[str, list[list[Any]]]()
    for position, record in enumerate(records):
        for event in record.events_of("draw"):
            if not event["fetching"]:
                ranks = found.setdefault(event["place"], [[] for _ in records])
                ranks[position].append(event["values"])
    return found


def draws_to_join(records: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether one process drew rows of its own no more often than each rank did, where the ranks drew different ones:
    its draws must then have the numbers of all ranks (see ``Feed``)."""
    if any(record.events_of("iteration") for record in records):
        return False
    found = draws_of_ranks(records)
    first, alone = records[0], defaultdict[str, int](int)
    at = min(1, len(first.steps) - 1)  # before the first of several steps a script draws other things as well
    for event in union.events_of("draw"):
        alone[event["place"]] += event["step"] == at
    for place, ranks in found.items():
        calls = [event for event in first.events_of("draw") if event["place"] == place and event["step"] == at]
        different = any(
            a is not None and b is not None and a.ndim and not np.array_equal(a, b)
            for other in ranks[1:]
            for a, b in zip(ranks[0], other, strict=False)
        )
        if (
            different
            and calls
            and calls[0]["function"] != "randperm"
            and calls[0]["gradients"]
            and len(calls) == alone[place]
        ):
            return True
    return False


def draws_for_batches(records: Sequence[RankRecord]) -> bool:
    """Whether the ranks draw different single numbers or orders in training, such as those by which the rows of a batch
    are mixed with each other: one process has one of them for all rows."""
    for place, ranks in draws_of_ranks(records).items():
        if not place.endswith(" with gradients") or not all(ranks):
            continue
        single = " randperm " in place or any(call is not None and call.size == 1 for call in ranks[0])
        if single and any(
            a is not None and b is not None and not np.array_equal(a, b)
            for other in ranks[1:]
            for a, b in zip(ranks[0], other, strict=False)
        ):
            return True
    return False


def draws_rank_by_rank(records: Sequence[RankRecord]) -> dict[str, list[list[Any]]]:
    """Returns the numbers of all ranks as those of one process that trains on their batches one after another: for each
    place those for the first batch of each rank, then those for the second ones. Of those before the first batch, which
    one process draws once, rank 0's."""
    found = defaultdict[str, dict[tuple[int, int], list[Any]]](lambda: defaultdict(list))
    for rank, record in enumerate(records):
        trained = {(each.loader, each.number) for each in reading(record) if each.trained}
        batches = 0
        for event in record.events_of("batch", "draw"):
            if event["kind"] == "batch":
                batches += (event["loader"], event["iteration"]) in trained
            elif not event["fetching"] and (batches or not rank):
                found[event["place"]][batches, rank].append(event["values"])
    return {place: [[values for turn in sorted(turns) for values in turns[turn]]] for place, turns in found.items()}
