"""Ranks against each other, without a reference: the number of steps that each has made."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns what differs between the ranks."""
    counts = [len(record.steps) for record in ranks]
    if len(set(counts)) == 1:
        return []
    fewest = counts.index(min(counts))
    others = [step["forwards"] for step in ranks[counts.index(max(counts))].steps]
    own = [step["forwards"] for step in ranks[fewest].steps]
    step = next((at for at, (a, b) in enumerate(zip(others, own, strict=False), 1) if a != b), len(own) + 1)
    return [
        Finding(
            "skipped_steps",
            "difference",
            f"Rank {fewest} made {min(counts)} optimizer steps where rank {counts.index(max(counts))} made "
            f"{max(counts)}; the first one that it left out is step {step}.",
            "Decide on all ranks alike whether a step is made, by a sum over the ranks of what is decided on.",
            ranks=(fewest,),
            step=step,
        )
    ]
