"""Collectives that cut the gradient, in the script as one process as well.

A further pass of one process gives their outputs the graph of their input. Where that changes the gradients, the loss
depends on what was gathered, and the script loses that part of the gradient.
"""

from __future__ import annotations

from apportion.script_check.comparison.table import first_difference
from apportion.script_check.comparison.tensors import StepBounds, shown
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def suspected(union: RankRecord) -> bool:
    """Whether a pass that joins the graphs can show more: a collective had an input with a graph and none behind it."""
    return bool(union.events_of("cut"))


def findings(union: RankRecord, joined: RankRecord | None, bounds: StepBounds = None) -> list[Finding]:
    """Returns that a part of the gradient is lost. ``joined``: the record of the pass that joins the graphs."""
    if joined is None or not joined.steps:
        return []
    found, _ = first_difference([union], joined, bounds)
    if found is None or found.what != "gradients":
        return []
    first, cut = found.differences_of(found.names[0])[0], union.events_of("cut")[0]
    names = tuple(shown(name, found.compared) for name in found.names)
    return [
        Finding(
            "gather_without_gradient",
            "difference",
            f"The {cut['function']} at {cut['site']} has no backward, and the loss depends on what it gathers: the "
            f"gradient through it is lost. With it, {len(names)} of {len(found.compared)} gradients differ (cosine "
            f"{first.cosine:.6g}), that of {names[0]} first.",
            "Gather with torch.distributed.nn.functional.all_gather, which has a backward, or put the "
            "rank's own tensor "
            "in its place and scale the loss so that the average over the ranks is right.",
            names,
            (),
            found.shown,
            cut["site"],
            first.ratio,
        )
    ]
