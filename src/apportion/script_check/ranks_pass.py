"""The pass over the ranks, under the conditions under which the script runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from apportion.script_check import failures
from apportion.script_check.passes import Conditions, PassResult
from apportion.script_check.retried import run_until_port_is_free
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
