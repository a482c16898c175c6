"""Makes, of what the ranks of one pass have recorded, the feed of the script as one process."""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.record import RankRecord
from apportion.script_check.rows import Unjoinable, joined


def union_feed(records: Sequence[RankRecord], *, interleaved: bool = False, weights: bool = True) -> Feed:
    """Returns the weights that the ranks began with, their learning rates, and the union of their rows.

    ``interleaved``: the batches of the ranks one after another, for a script that accumulates over more batches as one
    process, in place of joined ones. ``weights``: False where the script begins with the right ones by itself, such as
    those of all stages of a pipeline.
    """
    return Feed(_weights(records) if weights else {}, _rates(records[0]), _iterations(records, interleaved))


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
    rates = _rates(records[0])
    return Feed(_weights(records), rates, constants=windows, windows=1 if accumulated else len(records))


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


def _rates(record: RankRecord) -> dict[int, list[list[float]]]:
    rates = defaultdict[int, list[list[float]]](list)
    for step in record.steps:
        rates[step["optimizer"]].append(step["rates"])
    return dict(rates)


def _iterations(records: Sequence[RankRecord], interleaved: bool) -> dict[str, list[FedIteration]]:
    found = defaultdict[str, dict[int, list[tuple[RankRecord, Any]]]](lambda: defaultdict(list))
    for record in records:
        for event in record.of("iteration"):
            found[event["loader"]][event["number"]].append((record, event))
    return {
        loader: [_iteration(loader, number, numbers[number], interleaved) for number in sorted(numbers)]
        for loader, numbers in found.items()
    }


def _iteration(loader: str, number: int, begun: Sequence[tuple[RankRecord, Any]], interleaved: bool) -> FedIteration:
    read = [
        [e for e in record.of("batch") if e["loader"] == loader and e["iteration"] == number] for record, _ in begun
    ]
    exhausted = any(
        e["loader"] == loader and e["iteration"] == number for record, _ in begun for e in record.of("exhausted")
    )
    if all(is_evaluation(record, loader, number) for record, _ in begun) and _indexed(read):
        rows = sorted({index for batches in read for event in batches for index in event["indices"]})
        return FedIteration(indices=[rows], evaluation=True, exhausted=exhausted)
    parts = _distinct(read)
    length = begun[0][1]["length"]
    fed = FedIteration(exhausted=exhausted, length=length * len(parts) if interleaved and length else length)
    for position in range(max(map(len, read), default=0)):
        events = [batches[position] for batches in parts if position < len(batches)]
        for together in [[event] for event in events] if interleaved else [events]:
            tree, indices = _batch(together)
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


def _indexed(read: Sequence[Sequence[Any]]) -> bool:
    return all(
        event["indices"] is not None and all(isinstance(index, int) for index in event["indices"])
        for batches in read
        for event in batches
    )


def _distinct(read: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The batches of those ranks whose rows are not those of an earlier rank: the ranks of a tensor-parallel group, and
    the stages of a pipeline, read the same rows, which are no parts of a union."""
    found = dict[bytes, Sequence[Any]]()
    for batches in read:
        if batches or len(read) == 1:
            found.setdefault(_rows_of(batches), batches)
    return list(found.values())


def _rows_of(batches: Sequence[Any]) -> bytes:
    if _indexed([batches]):
        return pickle.dumps([list(event["indices"]) for event in batches])
    return hashlib.blake2b(pickle.dumps([event["rows"] for event in batches])).digest()


def is_evaluation(record: RankRecord, loader: str, number: int) -> bool:
    """Whether an iteration over a loader was an evaluation: between its batches networks were called without
    gradients, and never with them."""
    inside, without = False, False
    for event in record.events:
        if event["kind"] == "batch" and event["loader"] == loader:
            inside = event["iteration"] == number
        elif event["kind"] in ("exhausted", "iteration"):
            inside = False
        elif inside and event["kind"] == "forward":
            if event["gradients"]:
                return False
            without = True
        elif inside and event["kind"] == "step":
            return False
    return without
