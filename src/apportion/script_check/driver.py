"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from apportion.script_check.comparison import beside, ranks_agree, schedules, with_union
from apportion.script_check.findings import Answer, Finding, answer
from apportion.script_check.passes import Conditions, Passed, run_pass
from apportion.script_check.script import Script
from apportion.script_check.union import draws_to_join, union_feed

EPOCH_BATCHES = 8
"""The batches to which a longer epoch is shortened: a power of two, which micro-batches divide."""
STEPS = 24
"""The most steps of an optimizer: they reach into the third epoch of a shortened loader, of at most 11 batches."""


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
        union = run_pass("union", script, 1, conditions, union_feed(spread.records))
        if union.records and draws_to_join(spread.records, union.records[0]):
            union = run_pass("joined", script, 1, conditions, union_feed(spread.records, join_draws=True))
        found = _compare(spread, union)
        if any(finding.name == "schedule" for finding in found.findings) and beside.shortened(spread.records):
            found = replace(found, findings=_schedules(found.findings, script, ranks, conditions))
        return answer(found.findings, accept, undecided=found.reason, about=beside.shortened(spread.records))
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


def _compare(spread: Passed, union: Passed) -> Answer:
    findings: list[Finding] = [*ranks_agree.findings(spread.records)]
    undecided = ""
    reference = None
    if (reason := _unusable(union)) is not None:
        undecided = f"there is no reference, as the script does not run as one process: {reason}"
    else:
        reference = union.records[0]
        findings += with_union.findings(spread.records, reference)
    same = not any(finding.severity == "difference" for finding in findings)
    others = beside.findings(spread.records, reference, same_weights=same)
    return Answer("", (*others, *findings), reason=undecided)


def _schedules(findings: Sequence[Finding], script: Script, ranks: int, conditions: Conditions) -> tuple[Finding, ...]:
    """Compares the schedules again with whole epochs, as a schedule may be computed from the length of a loader that
    was shortened on the ranks and not in one process."""
    whole = replace(conditions, epoch_batches=0)
    spread = run_pass("whole-ranks", script, ranks, whole)
    union = run_pass("whole-union", script, 1, whole, union_feed(spread.records))
    others = tuple(finding for finding in findings if finding.name not in ("schedule", "scaled_rate"))
    if _unusable(spread) is not None or _unusable(union) is not None:
        return tuple(findings)
    return (*others, *schedules.findings(spread.records, union.records[0]))
