"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from apportion.script_check.comparison import gathers, numbers, ranks_agree, with_union
from apportion.script_check.comparison.extent import extent
from apportion.script_check.comparison.row_table import row_table
from apportion.script_check.comparison.step_table import step_table
from apportion.script_check.findings import Answer, Finding, answer
from apportion.script_check.passes import Conditions, Passed, run_pass
from apportion.script_check.script import Script
from apportion.script_check.union import union_feed

EPOCH_BATCHES = 8
"""The batches to which a longer epoch is shortened: a power of two, which micro-batches divide."""
STEPS = 20


def check_script(
    script: Script,
    *,
    ranks: int = 2,
    steps: int = STEPS,
    accept: Collection[str] = (),
    limit: float = 120.0,
    threads: int = 1,
) -> Answer:
    """Compare a script on ``ranks`` ranks with itself as one process on the union of their rows."""
    script.path  # noqa: B018 (raises where there is none)
    folder = Path(tempfile.mkdtemp(prefix="apportion-check-"))
    conditions = Conditions(folder, limit, threads, steps, EPOCH_BATCHES)
    try:
        spread = run_pass("ranks", script, ranks, conditions)
        if (reason := _unusable(spread)) is not None:
            return Answer("could not run", reason=reason)
        feed = union_feed(spread.records)
        union = run_pass("union", script, 1, conditions, feed)
        split = joined = None
        if _unusable(union) is None:
            if with_union.wants_split(spread.records, union.records[0]):
                few = replace(conditions, split_rows=True)
                split = run_pass("split", script, 1, few, feed)
            if gathers.suspected(union.records[0]):
                joined = run_pass("joined", script, 1, replace(conditions, join_gathers=True), feed)
        return _compare(spread, union, split, joined, accept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unusable(passed: Passed) -> str | None:
    if failed := passed.failed:
        outcome = failed[0].outcome or {}
        said = f"{outcome.get('type', '')}: {outcome.get('message', '')}" if outcome else passed.outputs[0][-300:]
        return f"the script failed on rank {failed[0].rank}: {said}"
    if not any(record.steps for record in passed.records):
        return "the script made no optimizer step"
    return None


def _compare(
    spread: Passed, union: Passed, split: Passed | None, joined: Passed | None, accept: Collection[str]
) -> Answer:
    findings: list[Finding] = [*ranks_agree.findings(spread.records)]
    undecided = ""
    about = list[str]()
    if (reason := _unusable(union)) is not None:
        undecided = f"there is no reference, as the script does not run as one process: {reason}"
        findings += numbers.findings(spread.records, None)
    else:
        further = [None if passed is None else passed.records[0] for passed in (split, joined)]
        findings += numbers.findings(spread.records, union.records[0], *further)
    compared = extent(spread.records, None if undecided else union.records[0])
    compared["loaders"] = row_table(spread.records)
    if not undecided:
        differs = any(finding.severity == "difference" for finding in findings)
        compared["table"] = step_table(spread.records, union.records[0], differs)
    return answer(findings, accept, undecided=undecided, compared=compared, about=about)
