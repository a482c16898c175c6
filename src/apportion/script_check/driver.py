"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from apportion.script_check import failures
from apportion.script_check.comparison import ranks_agree, with_union
from apportion.script_check.comparison.coverage import coverage, gradients_alike, same_rows
from apportion.script_check.findings import Answer, Finding, answer
from apportion.script_check.passes import Conditions, Passed
from apportion.script_check.references import Reference, reference, replayed
from apportion.script_check.retried import run_until_port_is_free
from apportion.script_check.rows import Unjoinable
from apportion.script_check.script import Script

EPOCH_BATCHES = 8
"""The batches to which a longer epoch is shortened: a power of two, which micro-batches divide."""
STEPS = 20

_UNCOMPILED = "What the script compiles ran uncompiled, in float64."
_OWN_ROWS = (
    "the script chooses its rows without a DataLoader, and as one process it chooses others than the ranks: have it "
    "read them through a loader or a batch sampler of torch, or divide the batch of all ranks by their number"
)


@dataclass(frozen=True)
class _Spread:
    """The pass over the ranks, and how it was run in the end."""

    passed: Passed
    conditions: Conditions
    about: tuple[str, ...]


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
        spread = _spread(script, ranks, conditions)
        if (reason := unusable(spread.passed, ranks)) is not None:
            return Answer("could not run", reason=reason, about=spread.about)
        try:
            found = reference(spread.passed, script, spread.conditions)
        except Unjoinable as error:
            undecided = f"there is no union of the rows, as {error}, and they have no indices to read them again by"
            return answer(ranks_agree.findings(spread.passed.records), accept, undecided=undecided, about=spread.about)
        return _compare(spread, found, script, accept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _spread(script: Script, ranks: int, conditions: Conditions) -> _Spread:
    """Runs the script on the ranks: as it is, then with the CPU for the GPUs that it asks for, then in its own
    precision where float64 may be what it does not accept."""
    passed = run_until_port_is_free("ranks", script, ranks, conditions)
    about = list[str]()
    for _ in range(2):
        failed = next((r for r in passed.failed if r.outcome is not None), None)
        if failed is None or failed.outcome is None:
            break
        if not conditions.no_gpu and failures.needs_gpu(failed.outcome, passed.outputs[failed.rank]):
            conditions = replace(conditions, no_gpu=True)
            about.append(
                f"The script asks for a GPU for each of {ranks} ranks, which this machine does not have: it ran on the "
                f"CPU, over gloo."
            )
        elif conditions.float64 and failures.may_need_own_precision(failed.outcome):
            conditions = replace(conditions, float64=False)
            about.append(
                f"The script cannot run in float64 ({failures.described(failed.outcome, '')}): it ran in its own "
                f"precision, in which smaller differences cannot be distinguished from rounding."
            )
        else:
            break
        passed = run_until_port_is_free(f"ranks{len(about)}", script, ranks, conditions)
    return _Spread(passed, conditions, tuple(about))


def unusable(passed: Passed, ranks: int) -> str | None:
    """Returns why a pass says nothing, and the remedy; None where it does."""
    if failed := passed.failed:
        first = next((r for r in failed if r.outcome is not None), failed[0])
        output = passed.outputs[first.rank]
        reason = f"the script failed on rank {first.rank}: {failures.described(first.outcome, output)}"
        return f"{reason} {failures.remedy(first.outcome, output, ranks)}".rstrip()
    if not any(record.steps for record in passed.records):
        return (
            "the script made no optimizer step. Give it arguments, after --, with which it trains; a step is seen "
            "where an optimizer of torch's kind, an object with step and zero_grad, or an update of tensors in place "
            "makes it."
        )
    return None


def _compare(spread: _Spread, found: Reference, script: Script, accept: Collection[str]) -> Answer:
    ranks = spread.passed.records
    findings: list[Finding] = [*ranks_agree.findings(ranks)]
    compiled = any(record.of("compiled") for record in ranks)
    about = (*spread.about, *([_UNCOMPILED] if compiled else []), *found.about)
    union = found.passed
    if (reason := unusable(union, 1)) is not None:
        undecided = f"there is no reference, as the script does not run as one process: {reason}"
        return answer(findings, accept, undecided=undecided, about=about)
    replay = _replay(spread, found, script)
    if replay is not None:
        found, union, about = replay, replay.passed, (*about, *replay.about)
    parted = with_union.findings(ranks, union.records[0], found.bounds)
    covered = coverage(ranks, union.records[0])
    undecided = covered.undecided
    if found.bounds is not None and not found.bounds:
        undecided = "rounding in the precision of the script is as large as what a mistake would change"
    step = next((finding.step for finding in parted if finding.step), None)
    if replay is None and not _on_same_rows(spread, found):
        parted, undecided = [], _OWN_ROWS
    elif replay is not None and step is not None and gradients_alike(ranks, step):
        # the mean over ranks that are weighted unequally on purpose, such as by their tokens, differs as well
        parted, undecided = [], _OWN_ROWS
    compared = {"steps": covered.steps, "tensors": covered.tensors}
    return answer([*findings, *parted], accept, undecided=undecided, compared=compared, about=about)


def _on_same_rows(spread: _Spread, found: Reference) -> bool:
    """Whether one process computed with the rows of the ranks, up to the first step at which they part."""
    union = found.passed.records[0]
    parted = with_union.findings(spread.passed.records, union, found.bounds)
    step = next((finding.step for finding in parted if finding.step), None)
    return step is None or same_rows(spread.passed.records, union, step)


def _replay(spread: _Spread, found: Reference, script: Script) -> Reference | None:
    """Runs the script as one process on what the ranks computed with, where on its own it chooses other rows."""
    if _on_same_rows(spread, found):
        return None
    return replayed(spread.passed, found.passed, script, spread.conditions)
