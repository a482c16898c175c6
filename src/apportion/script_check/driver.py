"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from apportion.script_check.comparison import beside, numbers, ranks_agree, schedules
from apportion.script_check.comparison.extent import extent
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.places import unplaced
from apportion.script_check.comparison.row_table import row_table
from apportion.script_check.comparison.step_table import step_table
from apportion.script_check.findings import Answer, Finding, answer
from apportion.script_check.further import further_passes
from apportion.script_check.hangs import report
from apportion.script_check.hangs.sentences import ranks as written_ranks
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
        if (hanging := _hanging(spread, script)) is not None:
            return hanging
        if (reason := _unusable(spread)) is not None:
            return Answer("could not run", reason=reason)
        found = _compare(_reference(spread, script, conditions))
        if any(finding.name == "schedule" for finding in found.findings) and beside.shortened(spread.records):
            found = replace(found, findings=_schedules(found.findings, script, ranks, conditions))
        return answer(found.findings, accept, undecided=found.reason, compared=found.compared, about=found.about)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hanging(passed: Passed, script: Script) -> Answer | None:
    """The answer about a pass whose ranks waited for each other; None where none did."""
    waited = passed.waited
    found = report.hang(passed.records, waited.stacks, died=waited.died, quiet=waited.quiet, folder=str(script.folder))
    if found is None or (waited.how == "limit" and not found.all_wait):
        return None
    findings = (found.finding, *report.silent(passed.records))
    compared = {"ranks": len(passed.records), "loaders": row_table(passed.records)}
    return Answer("the ranks wait for each other", findings, compared, ranks=found.lines, hang=found.details)


def _unusable(passed: Passed) -> str | None:
    if passed.waited.how == "limit":
        late = written_ranks(passed.unfinished)
        return f"{late} did not end within {passed.seconds:.0f} s; pass a higher limit or fewer steps"
    if passed.waited.how == "hang":
        found = report.hang(passed.records, passed.waited.stacks, died=passed.waited.died)
        return "its ranks wait for each other" if found is None else found.finding.sentence
    if failed := passed.failed:
        outcome = failed[0].outcome or {}
        said = f"{outcome.get('type', '')}: {outcome.get('message', '')}" if outcome else passed.outputs[0][-300:]
        return f"the script failed on rank {failed[0].rank}: {said}"
    if not any(record.steps for record in passed.records):
        return "the script made no optimizer step"
    return None


@dataclass(frozen=True)
class _Passes:
    """The passes over a script: its ranks, the script as one process on the union of their rows, and those of one
    process that are made where they can change the answer."""

    spread: Passed
    union: Passed
    further: Further


def _reference(spread: Passed, script: Script, conditions: Conditions) -> _Passes:
    """Runs the script as one process, and what else can change the answer."""
    feed = union_feed(spread.records)
    union = run_pass("union", script, 1, conditions, feed)
    if union.records and draws_to_join(spread.records, union.records[0]):
        feed = union_feed(spread.records, join_draws=True)
        union = run_pass("union-draws", script, 1, conditions, feed)
    if _unusable(union) is not None:
        return _Passes(spread, union, Further())
    return _Passes(spread, union, further_passes(script, spread.records, union.records[0], conditions, feed))


def _compare(passes: _Passes) -> Answer:
    """Returns what was found, without a verdict."""
    spread = passes.spread.records
    findings: list[Finding] = [*report.findings(spread), *ranks_agree.findings(spread)]
    undecided = ""
    about = [passes.spread.sandbox] if passes.spread.sandbox else []
    about += beside.shortened(spread)
    reason = _unusable(passes.union)
    union = None if reason is not None else passes.union.records[0]
    compared = extent(spread, union)
    compared["loaders"] = row_table(spread)
    if union is None:
        undecided = f"there is no reference, as the script does not run as one process: {reason}"
        findings += numbers.findings(spread, None)
    else:
        about += passes.further.about
        findings += numbers.findings(spread, union, passes.further)
        if lost := unplaced(spread, union):
            undecided = (
                f"{len(lost)} trained tensors ({', '.join(lost[:3])}) are no part of those of one process, "
                "and are not compared"
            )
        differs = any(finding.severity == "difference" for finding in findings)
        compared["table"] = step_table(spread, union, differs)
    same = not any(finding.severity == "difference" for finding in findings)
    others = beside.findings(spread, union, same_weights=same)  # first, as settings that differ explain the weights
    return Answer("", (*others, *findings), compared, tuple(about), undecided)


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
