"""The ranks against the script as one process on the union of their rows."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.script_check.comparison.causes import statistics
from apportion.script_check.comparison.causes.explain import explained
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.table import first_difference
from apportion.script_check.comparison.tensors import IN_FLOAT64, StepBounds, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def evidence_of(
    ranks: Sequence[RankRecord], union: RankRecord, split: RankRecord | None = None, bounds: StepBounds = None
) -> Evidence | None:
    """Returns what is known of the step at which the ranks and one process diverge, by more than ``bounds`` (see
    ``table.first_difference``); None where they do not."""
    found, _ = first_difference(ranks, union, bounds)
    if found is None:
        return None
    return Evidence(found, ranks, union, split, IN_FLOAT64 if bounds is None else bounds[found.optimizer, found.step])


def wants_split(ranks: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether a pass that splits the rows in each module can show why they differ."""
    evidence = evidence_of(ranks, union)
    return evidence is not None and explained(evidence).name == "differs" and statistics.suspected(evidence)


def findings_by_rank(ranks: Sequence[RankRecord], by_rank: RankRecord, bounds: StepBounds = None) -> list[Finding]:
    """Returns what else differs, beside modules that take statistics of each rank's rows. ``by_rank``: the record of
    one process whose modules do so, too. Only a cause that is known counts: what such modules do to rows that a script
    has rearranged may differ still."""
    evidence = evidence_of(ranks, by_rank, bounds=bounds)
    found = None if evidence is None else explained(evidence)
    return [] if found is None or found.name == "differs" else [found]


def findings(
    ranks: Sequence[RankRecord],
    union: RankRecord,
    split: RankRecord | None = None,
    until: int | None = None,
    bounds: StepBounds = None,
) -> list[Finding]:
    """Returns how the ranks' gradients and weights differ from those of one process, and why. ``split``: the record of
    the pass that splits rows, where there was one. ``until``: the step of all optimizers from which on a difference is
    explained already."""
    evidence = evidence_of(ranks, union, split, bounds)
    if evidence is None:
        return []
    step = step_of(union, evidence.found.optimizer, evidence.found.step)
    if until is not None and step is not None and step["step"] >= until:
        return []
    return [explained(evidence)]
