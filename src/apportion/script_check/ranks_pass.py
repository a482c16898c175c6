"""The pass over the ranks, under the conditions under which the script runs, and the steps of it that one process can
make on the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from apportion.script_check import failures
from apportion.script_check.comparison.reading import reading
from apportion.script_check.passes import Conditions, PassResult, run_until_port_is_free
from apportion.script_check.record import RankRecord
from apportion.script_check.script import Script

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
        if not conditions.no_gpu and failures.lacks_gpu(passed):
            conditions = replace(conditions, no_gpu=True)
            about.append(
                f"The script asks for a GPU for each of {ranks} ranks, which this machine does not have: it ran on the "
                f"CPU, over gloo."
            )
        elif conditions.float64 and failed and failed.outcome and failures.may_need_own_precision(failed.outcome):
            conditions = replace(conditions, float64=False)
            about.append(
                f"The script cannot run in float64 ({failures.described(failed.outcome, '')}): it ran in its own "
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
