"""Further passes of one process over a script, each run only where it can change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.script_check.comparison import gathers, numbers, rearrangement, with_union
from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.windows import windows
from apportion.script_check.passes import Conditions
from apportion.script_check.rearranged import rearranged_feed, step_rows, weights_after
from apportion.script_check.record import RankRecord
from apportion.script_check.references import Reference
from apportion.script_check.restarted import runs
from apportion.script_check.retried import run_until_port_is_free
from apportion.script_check.script import Script


class ReferenceUnavailable(Exception):
    """The gradients of a reference function cannot be computed, for the reason that the text gives."""


def further_passes(
    script: Script, ranks: Sequence[RankRecord], reference: Reference, conditions: Conditions
) -> Further:
    """Run the passes that what was recorded so far asks for; returns their records."""
    union, feed, bounds = reference.passed.records[0], reference.feed, reference.bounds
    found = Further(bounds=bounds)
    if gathers.suspected(union):
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
