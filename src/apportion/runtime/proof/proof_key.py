"""The key that a remembered proof is kept under: everything that decides which network is trained."""

from __future__ import annotations

from apportion.core.rng import seeded_rng
from apportion.core.strategy import Step
from apportion.core.workload import Workload
from apportion.runtime.proof.workload_digest import workload_digest


def proof_key(workload: Workload, step: Step) -> str | None:
    """Returns the key of this workload; None where something of it cannot be told from another. It leaves the
    generators as they were."""
    with seeded_rng(workload.seed):
        network = workload.model()
        example = step.source.dataset[0]
    return workload_digest(workload, network=network, batch=example)
