"""Further passes of one process over a script, each run only where it can change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.script_check.comparison import gathers, numbers, with_union
from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.feed import Feed
from apportion.script_check.passes import Conditions, run_pass
from apportion.script_check.record import RankRecord
from apportion.script_check.script import Script


def further_passes(
    script: Script, ranks: Sequence[RankRecord], union: RankRecord, conditions: Conditions, feed: Feed
) -> Further:
    """Run the passes that what was recorded so far asks for; returns their records."""
    found = Further()
    if gathers.suspected(union):
        joined = run_pass("joined", script, 1, replace(conditions, join_gathers=True), feed)
        found = replace(found, joined=joined.records[0])
    if with_union.wants_split(ranks, union):
        split = run_pass("split", script, 1, replace(conditions, split_rows=True), feed).records[0]
        found = replace(found, split=split)
        names = statistics.modules(split)
        if names and any(each.name == "batch_statistics" for each in numbers.findings(ranks, union, found)):
            by_rank = run_pass("by_rank", script, 1, replace(conditions, by_rank=names), feed)
            found = replace(found, by_rank=by_rank.records[0])
    return found
