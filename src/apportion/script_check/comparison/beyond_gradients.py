"""Findings that no comparison of gradients shows: orders and rows, evaluations, random numbers, settings,
resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.script_check.comparison import draws, evaluations, orders, resumes, settings, shared_rows
from apportion.script_check.comparison.reading import identified, reading
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord

_OF_STEPS = ("learning_rates", "weight_decay", "trained_parameters")


def findings(ranks: Sequence[RankRecord], union: RankRecord | None, *, same_weights: bool) -> list[Finding]:
    """Returns what is wrong apart from the gradients and weights of steps. ``union``: the script as one process, None
    where it does not run so; ``same_weights``: whether its weights are those of the ranks at each step."""
    readings = identified([reading(record) for record in ranks])
    differing = settings.findings(ranks)
    if not same_weights:  # ranks that set their optimizers differently train another network
        differing = [replace(each, severity="difference") if each.name in _OF_STEPS else each for each in differing]
    found = [
        *differing,
        *settings.scaler_findings(ranks),
        *orders.findings(ranks, readings),
        *shared_rows.findings(ranks, readings),
        *resumes.findings(ranks, readings),
        *resumes.lost_in_second_run(ranks),
        *draws.findings(ranks, readings),
        *evaluations.findings(ranks, readings, union if same_weights else None),
    ]
    if union is not None:
        found += settings.schedule_findings(ranks, union)
    return found


def shortened(ranks: Sequence[RankRecord]) -> list[str]:
    """Returns a sentence for each loader whose epochs were shortened."""
    lengths = {
        event["loader"]: (event["full"], event["length"])
        for record in ranks
        for event in record.events_of("iteration")
        if event["full"] != event["length"]
    }
    return [
        f"The epochs of the loader at {loader} were shortened from {full} batches to {length}: the first "
        f"{length - 1} and the last."
        for loader, (full, length) in lengths.items()
    ]
