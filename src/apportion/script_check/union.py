"""Makes, of what the ranks of one pass have recorded, the feed of the script as one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.record import RankRecord
from apportion.script_check.rows import Unjoinable, count, joined


def union_feed(records: Sequence[RankRecord]) -> Feed:
    """Returns the weights that the ranks began with, their learning rates, and the union of their rows."""
    return Feed(_weights(records), _rates(records[0]), _iterations(records))


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


def _iterations(records: Sequence[RankRecord]) -> dict[str, list[FedIteration]]:
    found = defaultdict[str, dict[int, list[tuple[RankRecord, Any]]]](lambda: defaultdict(list))
    for record in records:
        for event in record.of("iteration"):
            found[event["loader"]][event["number"]].append((record, event))
    return {
        loader: [_iteration(loader, number, numbers[number]) for number in sorted(numbers)]
        for loader, numbers in found.items()
    }


def _iteration(loader: str, number: int, begun: Sequence[tuple[RankRecord, Any]]) -> FedIteration:
    read = [
        [e for e in record.of("batch") if e["loader"] == loader and e["iteration"] == number] for record, _ in begun
    ]
    exhausted = any(
        e["loader"] == loader and e["iteration"] == number for record, _ in begun for e in record.of("exhausted")
    )
    if all(is_evaluation(record, loader, number) for record, _ in begun) and _indexed(read):
        rows = sorted({index for batches in read for event in batches for index in event["indices"]})
        return FedIteration(indices=[rows], evaluation=True, exhausted=exhausted)
    fed = FedIteration(exhausted=exhausted, length=begun[0][1]["length"])
    same = _same_rows(read)
    for position in range(max(map(len, read), default=0)):
        events = [batches[position] for batches in read if position < len(batches)]
        events = events[:1] if same else events  # every rank has read these very rows: they are no parts of a union
        tree, indices = None, None
        if all(event["indices"] is not None for event in events):
            indices = [index for event in events for index in event["indices"]]
        try:
            tree = joined([event["rows"] for event in events])
        except Unjoinable:
            if indices is None:
                raise
        fed.parts.append([count(event["rows"]) or 0 for event in events])
        fed.batches.append(tree)
        fed.indices.append(indices)
    return fed


def _indexed(read: Sequence[Sequence[Any]]) -> bool:
    return all(
        event["indices"] is not None and all(isinstance(index, int) for index in event["indices"])
        for batches in read
        for event in batches
    )


def _same_rows(read: Sequence[Sequence[Any]]) -> bool:
    """Whether all ranks read the same rows in the same order, as the ranks of a tensor-parallel group do."""
    return (
        len(read) > 1
        and _indexed(read)
        and all(
            [event["indices"] for event in batches] == [event["indices"] for event in read[0]] for batches in read[1:]
        )
    )


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
