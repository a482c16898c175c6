"""Makes, of what the ranks of one pass have recorded, the feed of the script as one process: weights, learning rates,
the union of the rows, and the random numbers that it has to draw in order to compute the same."""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from apportion.script_check.comparison.reading import Iteration, identified, random_values, reading, row_digests
from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.record import RankRecord, runs
from apportion.script_check.rows import Unjoinable, count, joined, split


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


def union_feed(
    records: Sequence[RankRecord], *, join_draws: bool = False, interleaved: bool = False, weights: bool = True
) -> Feed:
    """Returns the weights that the ranks began with, their learning rates, the union of their rows, and their draws.

    ``join_draws``: see ``Feed``. ``interleaved``: the batches of the ranks one after another, for a script that
    accumulates over more batches as one process, in place of joined ones. ``weights``: False where the script begins
    with the right ones by itself, such as those of all stages of a pipeline.

    A second run, that resumes, is fed with no weights: it begins with those that it loads.
    """
    first, *others = runs(records)
    begun = _weights(first) if weights else {}
    longest = max(first, key=lambda record: len(record.steps))
    again = union_feed(others[0], join_draws=join_draws, interleaved=interleaved, weights=False) if others else None
    rates, momenta = _rates(longest, "rates"), _rates(longest, "momenta")
    rows = _iterations(first, interleaved)
    return Feed(begun, rates, rows, draws_of_ranks(first), join_draws, momenta=momenta, again=again)


def feed_rank_by_rank(records: Sequence[RankRecord]) -> Feed:
    """Returns the feed of one process that reads the batches of the ranks one after another, each with the numbers that
    its rank drew for it, and takes the mean of the gradients of as many steps as there are ranks."""
    feed = union_feed(records, interleaved=True)
    return replace(feed, draws=draws_rank_by_rank(records), windows=len(records))


def replay_feed(records: Sequence[RankRecord], *, accumulated: bool) -> Feed | None:
    """Returns the feed of a script without a loader: what the ranks brought into each of their steps, one rank after
    another; None where that was not recorded. ``accumulated``: that one process accumulates over the batches of all
    ranks by itself."""
    steps = min(len(record.steps) for record in records)
    windows = list[list[Any]]()
    for step in range(steps):
        parts = [[e for e in record.events_of("constant") if e["step"] == step] for record in records]
        if not all(parts) or any(event["values"] is None for part in parts for event in part):
            break
        sequences = [[(event["function"], event["values"]) for event in part] for part in parts]
        windows += [list(chain(*sequences))] if accumulated else sequences
    if not windows:
        return None
    rates, momenta = _rates(records[0], "rates"), _rates(records[0], "momenta")
    count_of_windows = 1 if accumulated else len(records)
    return Feed(_weights(records), rates, constants=windows, windows=count_of_windows, momenta=momenta)


def _weights(records: Sequence[RankRecord]) -> dict[str, Any]:
    """The weights of the networks before the first step; empty where the ranks hold different tensors, as the stages of
    a pipeline do."""
    by_rank = [
        {
            name: array
            for event in record.events_of("network")
            if not event["step"]
            for name, array in event["weights"].items()
        }
        for record in records
    ]
    common = set.intersection(*map(set, by_rank)) if by_rank else set()
    alike = all(set(weights) == common for weights in by_rank)
    return {name: by_rank[0][name] for name in by_rank[0] if name in common} if alike else {}


def _rates(record: RankRecord, field: str) -> dict[int, list[Any]]:
    """A field of each step that has a value for each group of parameters, by optimizer."""
    rates = defaultdict[int, list[Any]](list)
    for step in record.steps:
        rates[step["optimizer"]].append(step.get(field, []))
    return dict(rates)


def _iterations(records: Sequence[RankRecord], interleaved: bool) -> dict[str, list[FedIteration]]:
    found = defaultdict[str, dict[int, list[tuple[RankRecord, Any]]]](lambda: defaultdict(list))
    readings = identified([reading(record) for record in records])
    trained = {(each.loader, each.number) for iterations in readings for each in iterations if not each.evaluation}
    local = {each.loader for iterations in readings for each in iterations if each.local}
    random = _random(records, readings)
    for record in records:
        for event in record.events_of("iteration"):
            found[event["loader"]][event["number"]].append((record, event))
    return {
        loader: [
            _iteration(
                _Loader(loader, loader in local, loader in random),
                number,
                numbers[number],
                (loader, number) not in trained,
                interleaved,
            )
            for number in sorted(numbers)
        ]
        for loader, numbers in found.items()
    }


def _random(records: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> set[str]:
    """The loaders whose rows are drawn at random: of numbers that global generators draw while a batch is fetched, or
    of other values when they are read again."""
    found = set[str]()
    for record, iterations in zip(records, readings, strict=True):
        drew = False
        for event in record.events_of("draw", "batch"):
            if event["kind"] == "draw":
                drew |= event["fetching"] and not event["given"]
            else:
                found |= {event["loader"]} if drew else set()
                drew = False
        for loader in {each.loader for each in iterations}:
            found |= {loader} if random_values([each for each in iterations if each.loader == loader]) else set()
    return found


class _Loader(NamedTuple):
    """A loader of the ranks. ``local``: whether each rank numbers rows of its own; ``random``: see ``_random``."""

    name: str
    local: bool
    random: bool


def _iteration(
    loader: _Loader, number: int, begun: Sequence[tuple[RankRecord, Any]], evaluation: bool, interleaved: bool
) -> FedIteration:
    name, local, size = loader.name, loader.local, begun[0][1]["rows"]
    read = [
        [e for e in record.events_of("batch") if e["loader"] == name and e["iteration"] == number]
        for record, _ in begun
    ]
    exhausted = any(
        e["loader"] == name and e["iteration"] == number for record, _ in begun for e in record.events_of("exhausted")
    )
    if evaluation and (local or not _indexed(read)) and begun[0][1]["batch_size"]:
        parts = _evaluated(read, local)
        if parts is not None:
            return FedIteration(batches=parts, evaluation=True, exhausted=exhausted, rows=size)
    elif evaluation and _indexed(read):
        rows = sorted({index for batches in read for event in batches for index in event["indices"]})
        return FedIteration(indices=[rows], evaluation=True, exhausted=exhausted, rows=size)
    # Ranks of a tensor-parallel group read the same rows, which one process reads once.
    parts = _distinct(read, local)
    length = begun[0][1]["length"]
    length = length * len(parts) if interleaved and length else length
    fed = FedIteration(exhausted=exhausted, length=length, rows=size)
    for position in range(max(map(len, read), default=0)):
        events = [batches[position] for batches in parts if position < len(batches)]
        for together in [[event] for event in events] if interleaved else [events]:
            tree, indices = _batch(together, loader.random)
            fed.parts.append([_count(event) for event in together])
            fed.batches.append(tree)
            fed.indices.append(indices)
    return fed


def _count(event: Any) -> int:
    known = len(event["indices"] or ())
    return count(event["rows"], known) or known


def _batch(events: Sequence[Any], random: bool) -> tuple[Any, list[Any] | None]:
    """The union of the rows of some batches: as a tree, or as indices where the batches cannot be joined. Parts that do
    not have a value for each row, such as the edges of all graphs, are made again from the indices, but for ``random``
    rows, which would be others then. Raises Unjoinable where random rows cannot be joined."""
    if len(events) == 1:
        return events[0]["rows"], events[0]["indices"]
    if any(event["indices"] is None for event in events):
        return joined([event["rows"] for event in events]), None
    indices = [index for event in events for index in event["indices"]]
    counts = [len(event["indices"]) for event in events]
    try:
        return joined([event["rows"] for event in events], counts, loosely=random), indices
    except Unjoinable:
        if random:
            raise
        return None, indices


def _evaluated(read: Sequence[Sequence[Any]], local: bool) -> list[Any] | None:
    """The rows of an evaluation that no indices name on all ranks alike, each as a batch of one row: those of one rank
    where all ranks read the same, and where each numbers its own rows, each number once. None where the batches cannot
    be divided into rows."""
    parts = list[Any]()
    try:
        for batches in read[:1] if not local and _same_rows(read) else read:
            seen = set[Any]()
            for event in batches:
                rows = split(event["rows"], len(event["indices"] or ()) or None)
                indices = event["indices"] if event["indices"] is not None else [None] * len(rows)
                for index, row in zip(indices, rows, strict=True):
                    if index is None or index not in seen:
                        parts.append(row)
                        seen.add(index)
    except ValueError:
        return None
    return parts


def _indexed(read: Sequence[Sequence[Any]]) -> bool:
    return all(
        event["indices"] is not None and all(isinstance(index, int) for index in event["indices"])
        for batches in read
        for event in batches
    )


def _same_rows(read: Sequence[Sequence[Any]]) -> bool:
    """Whether all ranks read the same rows in the same order, as the ranks of a tensor-parallel group do."""
    if len(read) < 2 or not read[0]:
        return False
    indexed = _indexed(read)
    first = [event["indices"] if indexed else list(row_digests(event["rows"])) for event in read[0]]
    return all(
        len(batches) == len(first)
        and all(
            (event["indices"] if indexed else list(row_digests(event["rows"]))) == rows
            for event, rows in zip(batches, first, strict=True)
        )
        for batches in read[1:]
    )


def _distinct(read: Sequence[Sequence[Any]], local: bool) -> list[Sequence[Any]]:
    """The batches of those ranks whose rows are not those of an earlier rank: the ranks of a tensor-parallel group, and
    the stages of a pipeline, read the same rows, which count once. ``local``: whether each rank numbers
    rows of its own, so that their numbers do not identify them."""
    found = dict[bytes, Sequence[Any]]()
    for batches in read:
        if batches or len(read) == 1:
            found.setdefault(_rows_of(batches, local), batches)
    return list(found.values())


def _rows_of(batches: Sequence[Any], local: bool) -> bytes:
    if _indexed([batches]) and not local:
        return pickle.dumps([list(event["indices"]) for event in batches])
    return hashlib.blake2b(pickle.dumps([event["rows"] for event in batches])).digest()
