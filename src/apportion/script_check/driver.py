"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from apportion.script_check.comparison import numbers, ranks_agree
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.places import unplaced
from apportion.script_check.findings import Answer, Finding, answer
from apportion.script_check.further import further_passes
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
        further = Further()
        if _unusable(union) is None:
            further = further_passes(script, spread.records, union.records[0], conditions, feed)
        return _compare(spread, union, further, accept)
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


def _compare(spread: Passed, union: Passed, further: Further, accept: Collection[str]) -> Answer:
    findings: list[Finding] = [*ranks_agree.findings(spread.records)]
    undecided = ""
    about = list[str]()
    if (reason := _unusable(union)) is not None:
        undecided = f"there is no reference, as the script does not run as one process: {reason}"
        findings += numbers.findings(spread.records, None)
    else:
        about.append("Compared with the script as one process on the union of the ranks' rows.")
        about += further.about
        findings += numbers.findings(spread.records, union.records[0], further)
        if lost := unplaced(spread.records, union.records[0]):
            undecided = (
                f"{len(lost)} trained tensors ({', '.join(lost[:3])}) are no part of those of one process, "
                "and are not compared"
            )
    return answer(findings, accept, undecided=undecided, about=about)
