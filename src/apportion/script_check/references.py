"""The reference that the ranks are compared with: the script as one process, in the form that fits what they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.script_check.comparison.coverage import same_rows
from apportion.script_check.comparison.first_difference import first_difference
from apportion.script_check.comparison.tensors import StepBounds, initial, measured_bounds, step_of
from apportion.script_check.feed import Feed, reversed_batches
from apportion.script_check.passes import Conditions, PassResult, run_until_port_is_free
from apportion.script_check.record import RankRecord
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
