"""Further passes of one process over a script, each run only where it can change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.script_check.comparison import gathers, numbers, with_union
from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.passes import Conditions
from apportion.script_check.record import RankRecord
from apportion.script_check.references import Reference
from apportion.script_check.retried import run_until_port_is_free
from apportion.script_check.script import Script


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
    return found
