"""Runs the passes over a script, compares them, and answers."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from apportion.script_check.comparison import beyond_gradients, evaluations, numbers, ranks_agree, settings
from apportion.script_check.comparison.coverage import coverage, extent, gradients_alike, not_finite, untrained
from apportion.script_check.comparison.first_difference import first_difference
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.ranks_agree import aligned
from apportion.script_check.comparison.reading import identified, reading
from apportion.script_check.comparison.tables import row_table, step_table
from apportion.script_check.comparison.tensors import StepBounds, unplaced
from apportion.script_check.feed import with_own_lengths
from apportion.script_check.findings import Finding, ScriptAnswer, answer
from apportion.script_check.hangs import report
from apportion.script_check.hangs.sentences import list_ranks
from apportion.script_check.passes import Conditions, PassResult, run_until_port_is_free
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


# The pass over the ranks, under the conditions under which the script runs, and the steps of it that one process can
# make on the same rows.


_PASS = 3
"""A third of the steps made within the limit are made again, as one process, which computes the rows of all ranks,
needs longer for a step."""


@dataclass(frozen=True)
class RanksPass:
    """The pass over the ranks, and how it was run in the end, as conditions and in sentences."""

    passed: PassResult
    conditions: Conditions
    about: tuple[str, ...] = ()


def run_on_ranks(script: Script, ranks: int, conditions: Conditions) -> RanksPass:
    """Run the script on the ranks: as it is, then with the CPU for the GPUs that it asks for, then in its own precision
    where float64 may be what it does not accept."""
    passed = run_until_port_is_free("ranks", script, ranks, conditions)
    about = list[str]()
    for _ in range(2):
        failed = next((r for r in passed.failed if r.outcome is not None), None)
        if not conditions.no_gpu and lacks_gpu(passed):
            conditions = replace(conditions, no_gpu=True)
            about.append(
                f"The script asks for a GPU for each of {ranks} ranks, which this machine does not have: it ran on the "
                f"CPU, over gloo."
            )
        elif conditions.float64 and failed and failed.outcome and may_need_own_precision(failed.outcome):
            conditions = replace(conditions, float64=False)
            about.append(
                f"The script cannot run in float64 ({described(failed.outcome, '')}): it ran in its own "
                f"precision, in which smaller differences cannot be distinguished from rounding."
            )
        else:
            break
        passed = run_until_port_is_free(f"ranks{len(about)}", script, ranks, conditions)
    return RanksPass(passed, conditions, tuple(about))


def within_limit(ranks_pass: RanksPass, script: Script, ranks: int) -> RanksPass:
    """Run a script whose ranks were still making steps at the end of the time of a pass again with fewer steps, as many
    as one process makes in that time, too; returns the pass as it is where its ranks have ended, or made no steps."""
    if ranks_pass.passed.waited.how != "limit":
        return ranks_pass
    made = min(max((step["number"] for step in record.steps), default=0) for record in ranks_pass.passed.records)
    steps = max(made // _PASS, 1)
    if made < 2:
        return ranks_pass
    conditions = replace(ranks_pass.conditions, steps=steps)
    passed = run_until_port_is_free("fewer-steps", script, ranks, conditions)
    sentence = (
        f"The ranks made {made} of {ranks_pass.conditions.steps} steps in the time of one run, so {steps} "
        f"{'is' if steps == 1 else 'are'} compared: what begins later, such as another epoch, is not."
    )
    return RanksPass(passed, conditions, (*ranks_pass.about, sentence))


def with_recorded_rows(ranks_pass: RanksPass) -> RanksPass:
    """Returns the pass with no more steps to compare than those whose batches were recorded by their contents: a large
    batch of images that is read again by its indices is another one where it is augmented at random. Where not even
    those of the first step were, all are read again."""
    records = ranks_pass.passed.records
    steps = min((_steps(record) for record in records), default=0)
    made = max((step["number"] for record in records for step in record.steps), default=0)
    if not 0 < steps < made:
        return ranks_pass
    sentence = (
        f"The batches are large, so the rows of the first {steps} of {made} steps were recorded, and these steps are "
        f"compared with one process."
    )
    return replace(
        ranks_pass, conditions=replace(ranks_pass.conditions, steps=steps), about=(*ranks_pass.about, sentence)
    )


def _steps(record: RankRecord) -> int:
    """The steps of an optimizer that a rank made before it read a batch to train on that was not recorded."""
    trained = {(each.loader, each.number) for each in reading(record) if not each.evaluation}
    unknown = [
        event["step"]
        for event in record.events_of("batch")
        if event.get("left_out") and (event["loader"], event["iteration"]) in trained
    ]
    first = min(unknown, default=None)
    return max((step["number"] for step in record.steps if first is None or step["step"] <= first), default=0)


# What a script that could not be run needs: a sentence for each kind of failure, and whether a GPU would help.


_GPU = re.compile(r"cuda|\bgpus?\b|nccl|nvidia|accelerator|device_count", re.IGNORECASE)
_REQUIRED = re.compile(r"error: the following arguments are required: (.+)")
_WORLD = re.compile(r"world.?size|\bmesh\b|nproc|num_replicas|\branks?\b|processes", re.IGNORECASE)
_FULL = re.compile(r"no space left|quota exceeded", re.IGNORECASE)
_NETWORK = re.compile(
    r"name resolution|couldn't connect|connection|max retries|offline|urlopen|network is unreachable|huggingface\.co|"
    r"cannot find the requested files in the (local|disk) cache",
    re.IGNORECASE,
)
_FILE = (
    "The script reads a file that is not there: give its path after --, or, where another rank writes it, have the "
    "ranks wait for that (torch.distributed.barrier) and the writer be rank 0."
)
_NETWORK_TYPES = {"URLError", "ConnectionError", "ConnectTimeout", "LocalEntryNotFoundError", "gaierror", "HTTPError"}


def unusable(passed: PassResult, ranks: int) -> str | None:
    """Returns why a pass says nothing, and the remedy; None where it does."""
    again = _of_second_run(passed)
    if passed.waited.how == "limit":
        late = list_ranks(passed.unfinished)
        return (
            f"{late}{again} did not end within {passed.seconds:.0f} s: compare fewer steps (--steps), or give the "
            f"script arguments with which a step is shorter"
        )
    if passed.waited.how == "hang":
        found = report.hang(passed.records, passed.waited.stacks, died=passed.waited.died)
        return "its ranks wait for each other" if found is None else found.finding.sentence
    if failed := passed.failed:
        first = next((r for r in failed if r.outcome is not None), failed[0])
        output = passed.outputs[first.rank]
        reason = f"the script{again} failed on rank {first.rank}: {described(first.outcome, output)}"
        help_ = _saved_late(first) if again else ""
        return ". ".join(filter(None, (reason.rstrip(". "), help_ or remedy(first.outcome, output, ranks))))
    last = next((line for line in map(last_line, passed.outputs) if line), "")
    if again and not any(record.runs[1].steps for record in passed.records):
        ending = f"; its last line was: {last}" if last else ""
        return (
            f"the script{again} made no optimizer step{ending}. Give it arguments with --then with which it goes on "
            f"after its first run, such as more epochs."
        )
    if not any(record.steps for record in passed.records):
        ending = f"; its last line was: {last}" if last else ""
        return (
            f"the script made no optimizer step{ending}. Give it arguments, after --, with which it trains; a step is "
            f"seen where an optimizer of torch's kind, an object with step and zero_grad, or an update of tensors in "
            f"place makes it."
        )
    return None


def _of_second_run(passed: PassResult) -> str:
    """What a second run was, as a clause between commas; empty where the script was run once."""
    if passed.then is None:
        return ""
    return f", run again with {shlex.join(passed.then)}," if passed.then else ", run again,"


def _saved_late(record: RankRecord) -> str:
    """What a second run needs that does not find a file; empty where it failed for another reason."""
    if record.outcome is None or record.outcome.get("type") not in ("FileNotFoundError", "CheckpointException"):
        return ""
    saved = list(dict.fromkeys(event["path"] for event in record.events_of("save") if event["path"]))
    steps = len(record.runs[0].steps)
    wrote = f"saved {', '.join(saved[:3])}" if saved else "saved nothing"
    return (
        f"In {steps} steps of its first run rank {record.rank} {wrote}: give the script arguments, after --, with "
        f"which it saves within them, and with --then those that name this file."
    )


def lacks_gpu(passed: PassResult) -> bool:
    """Whether a script failed, or ended before its first step, for lack of a GPU for each rank."""
    failed = next((record for record in passed.failed if record.outcome is not None), None)
    if failed is not None and failed.outcome is not None:
        return needs_gpu(failed.outcome, passed.outputs[failed.rank])
    ended = all(record.outcome is not None for record in passed.records)
    if not ended or any(record.steps for record in passed.records):
        return False
    return any(_GPU.search(output[-500:]) for output in passed.outputs)


def needs_gpu(outcome: Mapping[str, Any], output: str) -> bool:
    """Whether a script failed for lack of a GPU for each rank."""
    if outcome["how"] == "exited":
        return bool(_GPU.search(output[-500:]))
    return outcome["how"] == "raised" and bool(
        _GPU.search(f"{outcome.get('type', '')} {outcome.get('message', '')} {outcome.get('line', '')}")
    )


def may_need_own_precision(outcome: Mapping[str, Any]) -> bool:
    """Whether a failure may come from computing in float64: an error of torch or a check of the script, but not one of
    the failures that have a remedy of their own."""
    if outcome["how"] != "raised":
        return False
    if outcome.get("type") == "TooLargeForFloat64":
        return True
    kind, message = str(outcome.get("type", "")), str(outcome.get("message", ""))
    return kind in ("RuntimeError", "TypeError", "AssertionError", "ValueError", "NotImplementedError") and bool(
        re.search(
            r"dtype|double|float|scalar type|precision|c10::", f"{message} {outcome.get('line', '')}", re.IGNORECASE
        )
    )


def described(outcome: Mapping[str, Any] | None, output: str) -> str:
    """Returns what happened to a rank, in one clause."""
    if outcome is None:
        return f"its process died; its last line was: {last_line(output)}"
    if outcome["how"] == "exited":
        return f"it ended with status {outcome.get('code')}; its last line was: {last_line(output)}"
    where = f" at {outcome['site']}" if outcome.get("site") else ""
    return f"{outcome.get('type', 'an error')}{where}: {outcome.get('message', '')}"


def last_line(output: str) -> str:
    """Returns the last line of an output that is not empty."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def remedy(outcome: Mapping[str, Any] | None, output: str, ranks: int) -> str:
    """Returns the sentence that says what a script that failed needs; empty where nothing is known of it."""
    if outcome is None:
        return ""
    return next((sentence for rule in _RULES if (sentence := rule(outcome, output, ranks))), "")


def _arguments(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    if found := _REQUIRED.search(output):
        return f"The script needs the arguments {found[1].strip()}: give them after --."
    if outcome["how"] == "exited" and outcome.get("code") == 2 and "usage:" in output:
        return "The script does not accept these arguments: its own follow after --."
    if outcome.get("type") == "IndexError" and "sys.argv" in str(outcome.get("line", "")):
        return "The script needs an argument: give its own after --."
    return ""


def _world(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    text = f"{outcome.get('message', '')} {outcome.get('line', '')}"
    if outcome.get("type") not in ("AssertionError", "RuntimeError", "ValueError") or not _WORLD.search(text):
        return ""
    asked = [int(number) for number in re.findall(r"\b\d{1,3}\b", text) if int(number) not in (0, 1, ranks)]
    number = str(max(asked)) if asked else "N"
    return (
        f"The script asks for another number of ranks than {ranks}: run the check with --workers {number}, or make the "
        f"number that it asks for an argument."
    )


def _network(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    if outcome.get("type") in _NETWORK_TYPES or (
        outcome.get("type") in ("OSError", "RuntimeError", "ValueError")
        and _NETWORK.search(str(outcome.get("message")))
    ):
        return (
            "The script downloads data or weights, and the check runs without a network: run the script once by "
            "itself so that they are in its cache, or give it local files."
        )
    return ""


_BY_TYPE = {
    "FileNotFoundError": _FILE,
    "NotADirectoryError": _FILE,
    "ModuleNotFoundError": "The script imports a package that this Python does not have: install it, or use the "
    "script's own Python.",
}
"""What a script needs that raised an error of a type."""


def _by_type(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    if outcome.get("type") == "OSError" and _FULL.search(str(outcome.get("message"))):
        return (
            "What the script writes is held in temporary files until the end of the check: set TMPDIR to a folder of a "
            "file system with more room, or have the script save less."
        )
    return _BY_TYPE.get(str(outcome.get("type")), "")


_RULES: tuple[Callable[[Mapping[str, Any], str, int], str], ...] = (_arguments, _by_type, _network, _world)
