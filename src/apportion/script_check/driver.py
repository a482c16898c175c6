"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from apportion.script_check.comparison import beyond_gradients, evaluations, numbers, ranks_agree, settings
from apportion.script_check.comparison.coverage import coverage, extent, gradients_alike, not_finite, untrained
from apportion.script_check.comparison.first_difference import first_difference
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.places import unplaced
from apportion.script_check.comparison.ranks_agree import aligned
from apportion.script_check.comparison.reading import identified, reading
from apportion.script_check.comparison.tables import row_table, step_table
from apportion.script_check.comparison.tensors import StepBounds
from apportion.script_check.failures import lacks_gpu, unusable
from apportion.script_check.feed import with_own_lengths
from apportion.script_check.findings import Finding, ScriptAnswer, answer
from apportion.script_check.hangs import report
from apportion.script_check.passes import Conditions, PassResult, run_until_port_is_free
from apportion.script_check.ranks_pass import RanksPass, run_on_ranks, with_recorded_rows, within_limit
from apportion.script_check.record import RankRecord, runs
from apportion.script_check.references import (
    Reference,
    ReferenceUnavailable,
    further_passes,
    on_same_rows,
    rank_by_rank,
    reference,
    replayed,
    with_reference_gradients,
)
from apportion.script_check.rows import Unjoinable
from apportion.script_check.script import ReferenceFunction, Script
from apportion.script_check.union import draws_for_batches, union_feed
from apportion.script_check.waiting import SHORTEST

EPOCH_BATCHES = 8
"""The batches to which a longer epoch is shortened: a power of two, which micro-batches divide."""
STEPS = 24
"""The most steps of an optimizer: they reach into the third epoch of a shortened loader, of at most 11 batches."""
_UNCOMPILED = "What the script compiles ran uncompiled, in float64."
_UNREADABLE = "they have no indices to read them again by, or their values are random"
_OWN_ROWS = (
    "as one process the script chooses other rows than the ranks: have it read them through the same loader or batch "
    "sampler of torch, or, where it has none, divide the batch of all ranks by their number"
)


def check_script(  # noqa: PLR0913 (the flags)
    script: Script,
    *,
    ranks: int = 2,
    steps: int = STEPS,
    accept: Collection[str] = (),
    reference: ReferenceFunction | None = None,
    limit: float = 120.0,
    threads: int = 1,
) -> ScriptAnswer:
    """Compare a script on ``ranks`` ranks with itself as one process on the union of their rows, and with a function of
    the user's where there is one."""
    script.path  # noqa: B018 (raises where there is none)
    folder = Path(tempfile.mkdtemp(prefix="apportion-check-"))
    conditions = Conditions(folder, limit, threads, steps, EPOCH_BATCHES)
    try:
        ranks_pass = run_on_ranks(script, ranks, conditions)
        if (hanging := _hanging(ranks_pass.passed, script)) is not None:
            return replace(hanging, about=(*ranks_pass.about, *_second_run_sentence(ranks_pass.passed)))
        ranks_pass = within_limit(ranks_pass, script, ranks)
        if (reason := unusable(ranks_pass.passed, ranks)) is not None:
            return ScriptAnswer("could not run", reason=reason, about=ranks_pass.about)
        ranks_pass = replace(ranks_pass, passed=replace(ranks_pass.passed, records=aligned(ranks_pass.passed.records)))
        ranks_pass = with_recorded_rows(ranks_pass)
        try:
            passes = _passes(ranks_pass, script)
        except Unjoinable as error:
            passes = _Passes(ranks_pass, None, unlike=f"the rows have no union, as {error}, and {_UNREADABLE}")
        try:
            passes = _with_function(passes, script, reference)
        except ReferenceUnavailable as error:
            return ScriptAnswer("could not run", reason=str(error), about=tuple(passes.about))
        found = _compare(passes)
        union = None if passes.reference is None or passes.reference.replay else passes.union
        counted = union is not None and settings.in_batches_of_one_process(ranks_pass.passed.records, union)
        if counted or any(finding.name == "schedule" for finding in found.findings):
            findings = _schedules(found.findings, script, ranks, ranks_pass.conditions, own_lengths=counted)
            found = replace(found, findings=findings)
        if any(finding.name == "evaluation" for finding in found.findings):
            found = replace(found, findings=_evaluations(found.findings, script, passes))
        return answer(found.findings, accept, undecided=found.reason, compared=found.compared, about=found.about)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hanging(passed: PassResult, script: Script) -> ScriptAnswer | None:
    """The answer about a pass whose ranks waited for each other; None where none did."""
    waited = passed.waited
    if waited.how == "limit" and waited.unrecorded < SHORTEST:
        return None  # ranks that go on: their records, read one after the other, are not of one moment
    found = report.hang(passed.records, waited.stacks, died=waited.died, quiet=waited.quiet, folder=str(script.folder))
    if found is None or (waited.how == "limit" and not found.all_wait):
        return None
    findings = (found.finding, *report.silent_divergences(passed.records))
    compared = {"ranks": len(passed.records), "loaders": row_table(passed.records)}
    if found.finding.name == "skipped_steps":  # they wait in the record of a step alone
        return ScriptAnswer("another network", findings, compared)
    return ScriptAnswer("the ranks wait for each other", findings, compared, ranks=found.lines, hang=found.details)


@dataclass(frozen=True)
class _Passes:
    """The passes over a script: its ranks, the script as one process, and those of one process that are made where they
    can change the answer. ``unlike``: why one process is not one to compare the ranks with; empty where it is."""

    ranks_pass: RanksPass
    reference: Reference | None
    further: Further = field(default_factory=Further)
    unlike: str = ""

    @property
    def union(self) -> RankRecord | None:
        """The record of the script as one process; None where there is none."""
        usable = self.reference is not None and unusable(self.reference.passed, 1) is None
        return self.reference.passed.records[0] if self.reference is not None and usable else None

    @property
    def about(self) -> list[str]:
        """How the script was run, in sentences."""
        ranks = self.ranks_pass.passed.records
        compiled = [_UNCOMPILED] if any(record.events_of("compiled") for record in ranks) else []
        sandbox = [self.ranks_pass.passed.sandbox] if self.ranks_pass.passed.sandbox else []
        own = [
            *self.ranks_pass.about,
            *_second_run_sentence(self.ranks_pass.passed),
            *compiled,
            *sandbox,
            *beyond_gradients.shortened(ranks),
        ]
        return [*own, *(self.reference.about if self.reference is not None else ()), *self.further.about]


def _second_run_sentence(passed: PassResult) -> list[str]:
    """What was done in a second run, where there was one."""
    if passed.then is None:
        return []
    how = f"with {shlex.join(passed.then)}" if passed.then else "with the same arguments"
    ended = passed.waited.how == "ended"
    counted = "" if ended else " Its ranks did not end in this second run, whose steps are counted from 1."
    return [f"The script was run again, {how}, to go on from what its first run had saved.{counted}"]


def _passes(ranks_pass: RanksPass, script: Script) -> _Passes:
    """Runs the script as one process, and what else can change the answer."""
    ranks, conditions = ranks_pass.passed.records, ranks_pass.conditions
    found = reference(ranks_pass.passed, script, conditions)
    if conditions.no_gpu and lacks_gpu(found.passed):  # as one process it asks for as many GPUs as there are ranks
        conditions = replace(conditions, gpus=len(ranks), folder=conditions.folder / "gpus")
        found = reference(ranks_pass.passed, script, conditions)
    if (reason := unusable(found.passed, 1)) is not None:
        unlike = f"nothing can be the reference, as the script does not run as one process: {reason}"
        return _Passes(ranks_pass, found, unlike=unlike)
    if not on_same_rows(ranks, found):
        other = replayed(ranks_pass.passed, found.passed, script, conditions)
        if other is None:
            return _Passes(ranks_pass, found, unlike=_OWN_ROWS)
        parted, _ = first_difference(ranks, other.passed.records[0])
        if parted is not None and gradients_alike(ranks, parted.step):
            # the mean over ranks that are weighted unequally on purpose, such as by their tokens, differs as well
            return _Passes(ranks_pass, other, unlike=_OWN_ROWS)
        found = other
    further = further_passes(script, ranks, found, conditions)
    if found.bounds is None and draws_for_batches(ranks):
        differing = numbers.findings(ranks, found.passed.records[0], further)
        if {finding.name for finding in differing if finding.severity == "difference"} == {"differs"}:
            apart = rank_by_rank(ranks_pass.passed, script, conditions)
            if apart is not None:
                return _Passes(ranks_pass, apart)
    return _Passes(ranks_pass, found, further)


def _with_function(passes: _Passes, script: Script, function: ReferenceFunction | None) -> _Passes:
    """Adds what a function of the user's computes. Raises ReferenceUnavailable where it cannot be computed."""
    if function is None:
        return passes
    if passes.reference is None or passes.unlike:
        raise ReferenceUnavailable(
            f"{function.address} is given the rows of one process, and {passes.unlike or 'there is none'}"
        )
    conditions = replace(passes.ranks_pass.conditions, reference=function)
    ranks = passes.ranks_pass.passed.records
    return replace(
        passes, further=with_reference_gradients(script, ranks, passes.reference, conditions, passes.further)
    )


def _compare(passes: _Passes) -> ScriptAnswer:
    """Returns what was found, without a verdict."""
    ranks, union, undecided = passes.ranks_pass.passed.records, passes.union, passes.unlike
    findings: list[Finding] = [finding for run in runs(ranks) for finding in report.findings(run)]
    findings += ranks_agree.findings(ranks)
    compared = {**extent(ranks, None if undecided else union), "loaders": row_table(ranks)}
    if union is None or undecided:
        findings += numbers.findings(ranks, None)
    else:
        bounds = passes.further.bounds
        undecided = _undecided(ranks, union, bounds)
        findings += [*numbers.findings(ranks, union, passes.further), *untrained(ranks, union)]
        differs = any(finding.severity == "difference" for finding in findings)
        compared["table"] = step_table(ranks, union, differs, bounds)
    if passes.reference is not None and passes.reference.replay:
        union = None  # it runs through what follows each step once for each rank: schedules, averages of weights
    same = not passes.unlike and not any(finding.severity == "difference" for finding in findings)
    others = beyond_gradients.findings(
        ranks, union, same_weights=same
    )  # first, as settings that differ explain the weights
    return ScriptAnswer("", (*others, *findings), compared, tuple(passes.about), undecided)


def _undecided(ranks: Sequence[RankRecord], union: RankRecord, bounds: StepBounds) -> str:
    """Why a comparison that finds nothing says too little; empty where it says enough."""
    if bounds is not None and not bounds:
        return "rounding in the precision of the script is as large as what a mistake would change"
    if (name := not_finite(union)) is not None:
        return (
            f"the gradient of {name} is infinite or no number (NaN) at the first step, so the values that follow prove "
            f"nothing: see that all weights are initialized and all inputs are finite"
        )
    if lost := unplaced(ranks, union):
        return (
            f"{len(lost)} trained tensors ({', '.join(lost[:3])}) are no part of those of one process, and are not "
            f"compared"
        )
    return coverage(ranks, union).undecided


def _schedules(
    findings: Sequence[Finding], script: Script, ranks: int, conditions: Conditions, *, own_lengths: bool
) -> tuple[Finding, ...]:
    """Compares the schedules again with whole epochs, as a schedule may be computed from the length of a loader that
    was shortened on the ranks and not in one process, even of one that is never read, as accelerate makes another.
    ``own_lengths``: that loaders of one process have their own length, from which it has computed its schedule."""
    whole = replace(conditions, epoch_batches=0)
    of_ranks = run_until_port_is_free("whole-ranks", script, ranks, whole)
    feed = union_feed(of_ranks.records)
    feed = with_own_lengths(feed) if own_lengths else feed
    union = run_until_port_is_free("whole-union", script, 1, whole, feed)
    others = tuple(finding for finding in findings if finding.name not in ("schedule", "scaled_rate"))
    if unusable(of_ranks, ranks) is not None or unusable(union, 1) is not None:
        return tuple(findings)
    return (*others, *settings.schedule_findings(of_ranks.records, union.records[0]))


def _evaluations(findings: Sequence[Finding], script: Script, passes: _Passes) -> tuple[Finding, ...]:
    """Compares the evaluations again, without figures that one process has otherwise when it runs once more, such as
    the seconds that an evaluation took."""
    found, union = passes.reference, passes.union
    differs = any(finding.severity == "difference" for finding in findings)
    if found is None or union is None or found.replay or passes.unlike or differs:
        return tuple(findings)  # no figures were compared
    again = run_until_port_is_free("union-repeated", script, 1, passes.ranks_pass.conditions, found.feed)
    if unusable(again, 1) is not None:
        return tuple(findings)
    ranks = passes.ranks_pass.passed.records
    readings = identified([reading(record) for record in ranks])
    others = tuple(finding for finding in findings if finding.name != "evaluation")
    return (*others, *evaluations.findings(ranks, readings, union, again.records[0]))
