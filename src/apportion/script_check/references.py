"""The script as one process: the reference that the ranks are compared with, in the form that fits what they did, and
further passes of one process, each run only where it can change the answer.

One of them distributes the rows of each accumulation window differently over its micro-batches. The gradient of a step
is a sum over the rows of its window. Which rows share a micro-batch, and which micro-batch comes first, changes it by
rounding alone, unless rows have weights by their micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apportion.script_check.comparison import numbers, rearrangement
from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.coverage import same_rows
from apportion.script_check.comparison.first_difference import first_difference
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.rearrangement import AccumulationWindow, trained_batches, windows
from apportion.script_check.comparison.tensors import Array, StepBounds, initial, measured_bounds, step_of
from apportion.script_check.feed import FedIteration, Feed, reversed_batches
from apportion.script_check.passes import Conditions, PassResult, run_until_port_is_free
from apportion.script_check.record import RankRecord, runs
from apportion.script_check.rows import Unjoinable, joined, split
from apportion.script_check.script import Script
from apportion.script_check.union import draws_to_join, feed_rank_by_rank, replay_feed, union_feed


@dataclass(frozen=True)
class Reference:
    """A pass over the script as one process, with the feed that it read, and sentences on its form. ``bounds``: what
    rounding may change at each step, where the script ran in its own precision. ``replay``: whether it computed with
    what the ranks computed with, in place of rows."""

    passed: PassResult
    feed: Feed
    about: tuple[str, ...] = ()
    bounds: StepBounds = None
    replay: bool = False


def reference(of_ranks: PassResult, script: Script, conditions: Conditions) -> Reference:
    """Run the script as one process on what the ranks have read; in its own precision once more, with the rows of each
    batch in the opposite order, which measures what rounding changes."""
    found = _in_form(of_ranks, script, conditions)
    if conditions.float64 or found.passed.failed:
        return found
    other = run_until_port_is_free("union-reordered", script, 1, conditions, reversed_batches(found.feed))
    bounds = measured_bounds(found.passed.records[0], other.records[0])
    steps = f"{len(bounds)} steps" if bounds else "no step"
    sentence = f"Rounding was measured by the rows of each batch in another order: {steps} can be compared."
    return replace(found, bounds=bounds, about=(*found.about, sentence))


def _in_form(of_ranks: PassResult, script: Script, conditions: Conditions) -> Reference:
    """Runs the script as one process, in the form that fits.

    Its weights are set to those of rank 0, unless the ranks hold different parts of a network which the script makes
    whole by itself. The batches of the ranks are joined, or follow one another where one process accumulates over as
    many more of them. Where a script draws its rows, one draw has those of all ranks, or draws follow one another.
    """
    ranks = of_ranks.records
    weights = True
    # Stages of a pipeline, for example, hold different parts: the script as one process has to make the whole network
    # by itself, and its own weights are then the reference.
    if not _begin_alike(ranks):
        feed = union_feed(ranks, weights=False)
        alone = run_until_port_is_free("union-unfed", script, 1, conditions, feed)
        if not alone.failed and _holds_all(ranks, alone.records[0]):
            if not _accumulates(ranks, alone.records[0]):
                return Reference(alone, feed)
            weights = False
    feed = union_feed(ranks, weights=weights)
    union = run_until_port_is_free("union", script, 1, conditions, feed)
    if union.records and draws_to_join(ranks, union.records[0]):
        joining = union_feed(ranks, weights=weights, join_draws=True)
        joined = run_until_port_is_free("union-draws", script, 1, conditions, joining)
        if not joined.failed:  # it fails where a draw is not a batch, such as the state of a simulated environment
            return Reference(joined, joining)
    if ranks[0].events_of("batch") and _accumulates(ranks, union.records[0]):
        sentence = (
            f"As one process the script accumulates over {len(ranks)} times as many batches for a step, so it read "
            f"those of the ranks one after another."
        )
        feed = union_feed(ranks, weights=weights, interleaved=True)
        return Reference(run_until_port_is_free("union-interleaved", script, 1, conditions, feed), feed, (sentence,))
    return Reference(union, feed)


def on_same_rows(ranks: Sequence[RankRecord], found: Reference) -> bool:
    """Whether one process computed with the rows of the ranks, up to the first step at which they part."""
    union = found.passed.records[0]
    parted, _ = first_difference(ranks, union, found.bounds)
    step = None if parted is None else step_of(union, parted.optimizer, parted.step)
    return step is None or same_rows(ranks, union, step["step"])


def replayed(of_ranks: PassResult, union: PassResult, script: Script, conditions: Conditions) -> Reference | None:
    """Run a script that chooses its rows by itself as one process on what the ranks brought into their steps; None
    where that cannot be done. ``union``: how it ran as one process on rows of its own."""
    ranks, one = of_ranks.records, union.records[0]
    counts = {_constants_of_first_step(record) for record in ranks}
    if len(counts) != 1 or len({step["optimizer"] for step in ranks[0].steps}) != 1:
        return None
    count = counts.pop()
    if not count or _constants_of_first_step(one) not in (count, count * len(ranks)):
        return None
    feed = replay_feed(ranks, accumulated=_constants_of_first_step(one) != count)
    if feed is None:
        return None
    passed = run_until_port_is_free("union-replayed", script, 1, conditions, feed)
    if passed.failed or not passed.records[0].steps:
        return None
    sentence = (
        "The script chooses its rows without a loader, so one process computed with what each rank computed with, one "
        "rank after another, and took the mean of the gradients."
    )
    return Reference(passed, feed, (sentence,), replay=True)


def rank_by_rank(of_ranks: PassResult, script: Script, conditions: Conditions) -> Reference | None:
    """Run the script as one process on the batches of the ranks one after another, each with the numbers that its rank
    drew, and take the mean of the gradients; None where it is not what the ranks have computed."""
    ranks = of_ranks.records
    feed = feed_rank_by_rank(ranks)
    passed = run_until_port_is_free("union-by-rank", script, 1, conditions, feed)
    if passed.failed or not passed.records[0].steps or first_difference(ranks, passed.records[0])[0] is not None:
        return None
    sentence = (
        "The ranks draw numbers for whole batches, so one process read the batches of the ranks one after another, "
        "each with the numbers of its rank, and took the mean of the gradients."
    )
    return Reference(passed, feed, (sentence,), replay=True)


def _constants_of_first_step(record: RankRecord) -> int:
    return sum(event["step"] == 0 for event in record.events_of("constant"))


def _begin_alike(ranks: Sequence[RankRecord]) -> bool:
    first = initial(ranks[0])
    return all(
        set(other) == set(first) and all(np.array_equal(other[name], first[name], equal_nan=True) for name in first)
        for other in map(initial, ranks[1:])
    )


def _holds_all(ranks: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether one process begins with all tensors that any rank begins with."""
    whole = {(array.shape, array.tobytes()) for array in initial(union).values()}
    return bool(whole) and all(
        (array.shape, array.tobytes()) in whole for record in ranks for array in initial(record).values()
    )


def _accumulates(ranks: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether one process calls its networks N times as often before its first step as each of N ranks does, and not
    because it has those of all stages of a pipeline, or calls them once for each kind of rows in a joined batch."""
    if len(ranks) < 2 or not union.steps or not all(record.steps for record in ranks):
        return False
    if any(set(record.steps[0]["gradients"]) != set(union.steps[0]["gradients"]) for record in ranks):
        return False
    if (read := max(map(_batches_of_first_step, ranks))) and _batches_of_first_step(union) <= read:
        return False
    calls = {record.steps[0]["forwards"] for record in ranks}
    return len(calls) == 1 and calls != {0} and union.steps[0]["forwards"] == len(ranks) * calls.pop()


def _batches_of_first_step(record: RankRecord) -> int:
    """The batches that were read before the first step."""
    return sum(event["step"] == 0 for event in record.events_of("batch"))


class ReferenceUnavailable(Exception):
    """The gradients of a reference function cannot be computed, for the reason that the text gives."""


def further_passes(
    script: Script, ranks: Sequence[RankRecord], reference: Reference, conditions: Conditions
) -> Further:
    """Run the passes that what was recorded so far asks for; returns their records."""
    union, feed, bounds = reference.passed.records[0], reference.feed, reference.bounds
    found = Further(bounds=bounds)
    if numbers.cuts_gradient(union):
        joined = run_until_port_is_free("joined", script, 1, replace(conditions, join_gathers=True), feed)
        found = replace(found, joined=joined.records[0])
    if bounds is None and numbers.wants_split(ranks, union):  # rounding would look like a module that mixes rows
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
