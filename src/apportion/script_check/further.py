"""Further passes of one process over a script, each run only where it can change the answer.

One of them distributes the rows of each accumulation window differently over its micro-batches. The gradient of a step
is a sum over the rows of its window. Which rows share a micro-batch, and which micro-batch comes first, changes it by
rounding alone, unless rows have weights by their micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from apportion.script_check.comparison import numbers, rearrangement, with_union
from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.rearrangement import AccumulationWindow, trained_batches, windows
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.passes import Conditions, run_until_port_is_free
from apportion.script_check.record import RankRecord, runs
from apportion.script_check.references import Reference
from apportion.script_check.rows import Unjoinable, joined, split
from apportion.script_check.script import Script


class ReferenceUnavailable(Exception):
    """The gradients of a reference function cannot be computed, for the reason that the text gives."""


def further_passes(
    script: Script, ranks: Sequence[RankRecord], reference: Reference, conditions: Conditions
) -> Further:
    """Run the passes that what was recorded so far asks for; returns their records."""
    union, feed, bounds = reference.passed.records[0], reference.feed, reference.bounds
    found = Further(bounds=bounds)
    if with_union.cuts_gradient(union):
        joined = run_until_port_is_free("joined", script, 1, replace(conditions, join_gathers=True), feed)
        found = replace(found, joined=joined.records[0])
    if bounds is None and with_union.wants_split(ranks, union):  # rounding would look like a module that mixes rows
        split = run_until_port_is_free("split", script, 1, replace(conditions, split_rows=True), feed).records[0]
        found = replace(found, split=split)
        names = statistics.modules(split)
        if names and any(each.name == "batch_statistics" for each in numbers.findings(ranks, union, found)):
            by_rank = run_until_port_is_free("by_rank", script, 1, replace(conditions, by_rank=names), feed)
            found = replace(found, by_rank=by_rank.records[0])
    return _rearranged(script, ranks, reference, conditions, found)


def with_reference_gradients(
    script: Script, ranks: Sequence[RankRecord], reference: Reference, conditions: Conditions, found: Further
) -> Further:
    """Run one process in which the function that the conditions name computes its gradient before each step, at the
    weights of the ranks; returns what was recorded so far with that.

    Raises ReferenceUnavailable where the function fails, or cannot be given the rows of any step.
    """
    function = conditions.reference
    if function is None:
        return found
    rows = step_rows(reference.feed, reference.passed.records[0])
    if reference.replay or not rows:
        raise ReferenceUnavailable(
            f"{function.address} cannot be given the rows of a step, which it takes as one batch: the script has to "
            "read them through one loader, in batches that can be joined"
        )
    feed = replace(reference.feed, step_rows=rows, weights_after=weights_after(ranks[0]))
    record = run_until_port_is_free("stated", script, 1, conditions, feed).records[0]
    for failed in record.events_of("reference_failed"):
        line = f" ({failed['text']})" if failed["text"] else ""
        raise ReferenceUnavailable(f"{function.address} fails at {failed['site']}{line}: {failed['message']}")
    if not record.events_of("reference"):
        raise ReferenceUnavailable(
            f"{function.address} was called at no step, as no optimizer of torch's kind made one on its rows"
        )
    return replace(found, by_function=record, function=function.address)


def _rearranged(
    script: Script, ranks: Sequence[RankRecord], reference: Reference, conditions: Conditions, found: Further
) -> Further:
    """Run one process with the rows of each step distributed differently over its micro-batches, where it accumulates
    and nothing else was found; returns what was recorded so far with that."""
    union = reference.passed.records[0]
    if reference.replay or found.bounds is not None or not windows(union):
        return found
    if any(each.severity == "difference" for each in numbers.findings(ranks, union, found)):
        return found
    (first,), *_ = runs([union])  # a second run, that resumes, reads what it has read
    feed = rearranged_feed(reference.feed, first)
    other = run_until_port_is_free("rearranged", script, 1, conditions, feed).records[0]
    found = replace(found, rearranged=rearrangement.compared(union, other))
    if found.split is None and any(
        each.name == "micro_batch_statistics" for each in rearrangement.findings(ranks, found.rearranged)
    ):
        split = run_until_port_is_free("split", script, 1, replace(conditions, split_rows=True), reference.feed)
        found = replace(found, split=split.records[0])
    return found


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
