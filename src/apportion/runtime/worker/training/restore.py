"""The start of a run: its directory is begun, or gone on from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.fingerprint import check_fingerprint
from apportion.core.strategy import Step
from apportion.core.workload import Workload
from apportion.parallel.replica.resync import broadcast_state
from apportion.runtime.checkpoint.code_ownership import factory_of
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.worker.job import Job


def open_directory(job: Job, world: World) -> RunDirectory | None:
    """Opens the run directory on rank 0, which keeps it; returns None on the other ranks, and where there is none.
    After a change of the membership nobody else writes it from then on."""
    if job.run_dir is None or world.rank != 0:
        return None
    directory = RunDirectory(job.run_dir)
    if world.generation:
        _claim(directory, world)
    return directory


def _claim(directory: RunDirectory, world: World) -> None:
    """Keeps out other starts of a run on several hosts, and who was rank 0 before; where the run has begun here."""
    if world.meeting is not None and (directory.path / "run.json").exists():
        directory.claim(os.environ["TORCHELASTIC_RUN_ID"], world.generation)


@collective
def restore(
    job: Job,
    directory: RunDirectory | None,
    workload: Workload,
    step: Step,
    world: World,
    proof: Mapping[str, Any] | None,
) -> float | None:
    """Starts the run directory, or loads its last checkpoint into the step; returns the best value of the metric so
    far. Called by all ranks."""
    if job.run_dir is None:
        return None
    state = None
    if directory is not None:
        mark = step.fingerprint(workload)
        if job.resume:
            check_fingerprint(directory.read_run().get("fingerprint", {}), mark)
        else:
            directory.start(_description(job, workload, mark, proof))
        _claim(directory, world)
        if job.resume and directory.steps():  # else it was cut off before its first checkpoint, and begins again
            state = directory.resume(mark)
    if not job.resume:
        return None
    state = broadcast_state(state, world.group(), device=world.device)
    if state is None:
        return None
    step.load_state_dict(state)
    best: float | None = state.settings.get("best")
    return best


def _description(
    job: Job, workload: Workload, mark: Mapping[str, Any], proof: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "address": job.address,
        **({} if isinstance(job.workload, str) else {"factory": factory_of(workload.model)}),
        "strategy": str(job.strategy),
        "launcher": job.launcher,
        "policy": str(job.policy),
        "changes": dict(job.changes),
        "fingerprint": dict(mark),
        "proof": proof,
    }
