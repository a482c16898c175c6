"""Makes, of what the ranks of one pass have recorded, the feed of the script as one process."""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from apportion.script_check.comparison.reading import identified, reading, row_digests
from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.record import RankRecord
from apportion.script_check.rows import Unjoinable, count, joined, split


def union_feed(
    records: Sequence[RankRecord], *, join_draws: bool = False, interleaved: bool = False, weights: bool = True
) -> Feed:
    """Returns the weights that the ranks began with, their learning rates, the union of their rows, and their draws.

    ``join_draws``: see ``Feed``. ``interleaved``: the batches of the ranks one after another, for a script that
    accumulates over more batches as one process, in place of joined ones. ``weights``: False where the script begins
    with the right ones by itself, such as those of all stages of a pipeline.
    """
    begun = _weights(records) if weights else {}
    momenta = _settings(records[0], "momenta")
    rates = _settings(records[0], "rates")
    return Feed(begun, rates, _iterations(records, interleaved), _draws(records), join_draws, momenta=momenta)


def draws_to_join(records: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether one process drew rows of its own no more often than each rank did, where the ranks drew different ones:
    its draws must then have the numbers of all ranks (see ``Feed``)."""
    if any(record.of("iteration") for record in records):
        return False
    found = _draws(records)
    first, alone = records[0], defaultdict[str, int](int)
    at = min(1, len(first.steps) - 1)  # before the first of several steps a script draws other things as well
    for event in union.of("draw"):
        alone[event["place"]] += event["step"] == at
    for place, ranks in found.items():
        calls = [event for event in first.of("draw") if event["place"] == place and event["step"] == at]
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


def _draws(records: Sequence[RankRecord]) -> dict[str, list[list[Any]]]:
    found = dict[str, list[list[Any]]]()
    for position, record in enumerate(records):
        for event in record.of("draw"):
            if not event["fetching"]:
                ranks = found.setdefault(event["place"], [[] for _ in records])
                ranks[position].append(event["values"])
    return found


def replay_feed(records: Sequence[RankRecord], *, accumulated: bool) -> Feed | None:
    """Returns the feed of a script without a loader: what the ranks brought into each of their steps, one rank after
    another; None where that was not recorded. ``accumulated``: that one process accumulates over the batches of all
    ranks by itself."""
    steps = min(len(record.steps) for record in records)
    windows = list[list[Any]]()
    for step in range(steps):
        parts = [[e for e in record.of("constant") if e["step"] == step] for record in records]
        if not all(parts) or any(event["values"] is None for part in parts for event in part):
            break
        sequences = [[(event["function"], event["values"]) for event in part] for part in parts]
        windows += [list(chain(*sequences))] if accumulated else sequences
    if not windows:
        return None
    rates, momenta = _settings(records[0], "rates"), _settings(records[0], "momenta")
    count = 1 if accumulated else len(records)
    return Feed(_weights(records), rates, constants=windows, windows=count, momenta=momenta)


def _weights(records: Sequence[RankRecord]) -> dict[str, Any]:
    """The weights of the networks before the first step; none of those that the ranks do not all have, such as the
    stages of a pipeline."""
    by_rank = [
        {name: array for event in record.of("network") if not event["step"] for name, array in event["weights"].items()}
        for record in records
    ]
    common = set.intersection(*map(set, by_rank)) if by_rank else set()
    alike = all(set(weights) == common for weights in by_rank)
    return {name: by_rank[0][name] for name in by_rank[0] if name in common} if alike else {}


def _settings(record: RankRecord, field: str) -> dict[int, list[list[Any]]]:
    """What each parameter group was set to at each step, by optimizer."""
    found = defaultdict[int, list[list[Any]]](list)
    for step in record.steps:
        found[step["optimizer"]].append(step.get(field, []))
    return dict(found)


def _iterations(records: Sequence[RankRecord], interleaved: bool) -> dict[str, list[FedIteration]]:
    found = defaultdict[str, dict[int, list[tuple[RankRecord, Any]]]](lambda: defaultdict(list))
    readings = identified([reading(record) for record in records])
    trained = {(each.loader, each.number) for iterations in readings for each in iterations if not each.evaluation}
    local = {each.loader for iterations in readings for each in iterations if each.local}
    for record in records:
        for event in record.of("iteration"):
            found[event["loader"]][event["number"]].append((record, event))
    return {
        loader: [
            _iteration(loader, number, numbers[number], (loader, number) not in trained, loader in local, interleaved)
            for number in sorted(numbers)
        ]
        for loader, numbers in found.items()
    }


def _iteration(
    loader: str,
    number: int,
    begun: Sequence[tuple[RankRecord, Any]],
    evaluation: bool,
    local: bool,
    interleaved: bool,
) -> FedIteration:
    read = [
        [e for e in record.of("batch") if e["loader"] == loader and e["iteration"] == number] for record, _ in begun
    ]
    exhausted = any(
        e["loader"] == loader and e["iteration"] == number for record, _ in begun for e in record.of("exhausted")
    )
    if evaluation and (local or not _indexed(read)) and begun[0][1]["batch_size"]:
        parts = _evaluated(read, local)
        if parts is not None:
            return FedIteration(batches=parts, evaluation=True, exhausted=exhausted)
    elif evaluation and _indexed(read):
        rows = sorted({index for batches in read for event in batches for index in event["indices"]})
        return FedIteration(indices=[rows], evaluation=True, exhausted=exhausted)
    parts = _distinct(read, local)
    length = begun[0][1]["length"]
    fed = FedIteration(exhausted=exhausted, length=length * len(parts) if interleaved and length else length)
    for position in range(max(map(len, read), default=0)):
        events = [batches[position] for batches in parts if position < len(batches)]
        for together in [[event] for event in events] if interleaved else [events]:
            tree, indices = _batch(together)
            fed.parts.append([count(event["rows"]) or len(event["indices"] or ()) for event in together])
            fed.batches.append(tree)
            fed.indices.append(indices)
    return fed


def _batch(events: Sequence[Any]) -> tuple[Any, list[Any] | None]:
    """The union of the rows of some batches: as a tree, or as indices where the batches cannot be joined."""
    indices = None
    if all(event["indices"] is not None for event in events):
        indices = [index for event in events for index in event["indices"]]
    try:
        return joined([event["rows"] for event in events]), indices
    except Unjoinable:
        if indices is None:
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
                rows = split(event["rows"])
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
    the stages of a pipeline, read the same rows, which are no parts of a union. ``local``: whether each rank numbers
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
