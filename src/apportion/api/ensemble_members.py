"""The members of an ensemble: the same workload from different seeds."""

from __future__ import annotations

from apportion.api.side_by_side import MemberRun
from apportion.core.address import load_workload


def ensemble_members(workload: str, members: int) -> list[MemberRun]:
    """m1, m2, ... with the workload's seed, that plus one, and so on."""
    if members < 2:
        raise ValueError(f"members={members} must be at least 2: an ensemble of one is a run without --members")
    first = load_workload(workload).seed
    return [MemberRun(f"m{n + 1}", workload, ("--seed", str(first + n))) for n in range(members)]
