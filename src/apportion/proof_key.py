"""What a remembered proof is kept under: everything that decides which network is trained."""

from __future__ import annotations

from apportion.strategy import Step
from apportion.workload import Workload


def proof_key(workload: Workload, step: Step) -> str | None:
    """Of this workload; None where something of it cannot be told from another."""
    return None
