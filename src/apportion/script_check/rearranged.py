"""Distributes the rows of each accumulation window differently over its micro-batches, for a pass of one process.

The gradient of a step is a sum over the rows of its window. Which rows share a micro-batch, and which micro-batch comes
first, changes it by rounding alone, unless rows have weights by their micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from apportion.script_check.comparison.tensors import Array
from apportion.script_check.comparison.windows import AccumulationWindow, trained_batches, windows
from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.record import RankRecord
from apportion.script_check.rows import Unjoinable, joined, split

MOST_ELEMENTS = 1 << 25
"""The elements of all weights that the pass is given; what follows is not compared."""
_Batch = tuple[Any, list[Any] | None]
"""The rows of a batch as a tree and as indices, either of which may be missing."""


def rearranged_feed(feed: Feed, union: RankRecord) -> Feed:
    """Returns the feed of a pass in which the windows of ``union``, which read ``feed``, have their rows in another
    distribution, and each step begins with the weights that it began with there."""
    iterations = {
        loader: [replace(each, batches=list(each.batches), indices=list(each.indices)) for each in found]
        for loader, found in feed.iterations.items()
    }
    for window in windows(union).values():
        _rearrange(iterations, window)
    return replace(feed, iterations=iterations, weights_after=weights_after(union))


def step_rows(feed: Feed, union: RankRecord) -> dict[int, Any]:
    """Returns all rows that ``union`` read of a feed for each of its steps, as one batch, by the step of all
    optimizers, counted from 1. Steps that read several loaders, or batches that cannot be joined, are left out."""
    found = dict[int, Any]()
    for step, batches in trained_batches(union).items():
        places = [(feed.iterations.get(loader, []), at, number) for (loader, at, number), _ in batches]
        if len({loader for (loader, _, _), _ in batches}) > 1:
            continue
        trees = [fed[at].batches[number] for fed, at, number in places if at < len(fed)]
        try:
            if len(trees) == len(batches) and all(tree is not None for tree in trees):
                found[step] = joined(trees)
        except Unjoinable:
            continue
    return found


def _rearrange(iterations: dict[str, list[FedIteration]], window: AccumulationWindow) -> None:
    places = [(iterations[loader][iteration], number) for loader, iteration, number in window.batches]
    if any(number >= len(fed.batches) for fed, number in places):
        return
    batches = [(fed.batches[number], fed.indices[number]) for fed, number in places]
    try:
        if window.moves_whole and len(batches) > 1:
            batches = [*batches[1:], batches[0]]  # also where they are of unequal size, or cannot be split
        else:
            batches = _rolled(batches, window.moved)
    except ValueError:
        return  # the rows cannot be separated
    for (fed, number), (tree, indices) in zip(places, batches, strict=True):
        fed.batches[number], fed.indices[number] = tree, indices


def _rolled(batches: Sequence[_Batch], by: int) -> list[_Batch]:
    """Moves the rows of batches by some places, over their bounds. Raises ValueError where that cannot be done."""
    try:
        parts = [split(tree) for tree, _ in batches]
        trees: list[Any] = [joined(part) for part in _moved(parts, by)]
    except Unjoinable:
        if any(indices is None for _, indices in batches):
            raise
        trees = [None for _ in batches]
    if any(indices is None for _, indices in batches):
        return [(tree, None) for tree in trees]
    return list(zip(trees, _moved([indices or [] for _, indices in batches], by), strict=True))


def _moved(parts: Sequence[Sequence[Any]], by: int) -> list[list[Any]]:
    rows = [row for part in parts for row in part]
    rows, starts = rows[by:] + rows[:by], [sum(map(len, parts[:at])) for at in range(len(parts))]
    return [rows[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]


def weights_after(record: RankRecord) -> dict[int, list[dict[str, Array]]]:
    """Returns the weights after the steps of each optimizer, up to ``MOST_ELEMENTS`` in all."""
    found, room = dict[int, list[dict[str, Array]]](), MOST_ELEMENTS
    for step in record.steps:
        room -= sum(array.size for array in step["weights"].values())
        if room < 0:
            break
        found.setdefault(step["optimizer"], []).append(step["weights"])
    return found
