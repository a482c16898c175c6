"""Which rows each rank has read from each loader, for people and programs to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.script_check.record import RankRecord
from apportion.script_check.rows import count

MOST_ITERATIONS = 4
MOST_BATCHES = 24
MOST_ROWS = 256


def row_table(ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Returns for each loader its ``name``, the file and line that made it, the ``rows`` of its data set, where that
    has a length, its ``sampler`` and its ``iterations``; each of these has, by rank, its batches, and each batch the
    indices of its rows, or their number alone where the data has no indices. ``left_out``: the iterations beyond
    MOST_ITERATIONS."""
    loaders = dict[str, dict[str, Any]]()
    iterations = dict[str, dict[int, list[list[list[int] | int]]]]()
    for rank, record in enumerate(ranks):
        for event in record.events_of("iteration"):
            about = {"name": event["loader"], "rows": event["rows"], "sampler": event["sampler"]}
            loaders.setdefault(event["loader"], about)
            found = iterations.setdefault(event["loader"], {})
            found.setdefault(event["number"], [[] for _ in ranks])
        for event in record.events_of("batch"):
            batches = iterations.get(event["loader"], {}).get(event["iteration"], [[] for _ in ranks])[rank]
            if len(batches) < MOST_BATCHES:
                batches.append(_batch(event["indices"], event["rows"]))
    return [
        {
            **about,
            "iterations": [iterations[name][number] for number in sorted(iterations[name])[:MOST_ITERATIONS]],
            "left_out": max(0, len(iterations[name]) - MOST_ITERATIONS),
        }
        for name, about in loaders.items()
    ]


def _batch(indices: Sequence[Any] | None, rows: Any) -> list[int] | int:
    if indices is not None and len(indices) <= MOST_ROWS and all(isinstance(index, int) for index in indices):
        return list(indices)
    return len(indices) if indices is not None else count(rows) or 0
