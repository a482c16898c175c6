"""The start of a run: its directory is begun, or gone on from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from apportion.comm.group import broadcast_message, collective
from apportion.comm.world import World
from apportion.core.fingerprint import check_fingerprint
from apportion.core.loss_terms import description_of
from apportion.core.strategy import Step, Strategy, cut_at
from apportion.core.workload import Workload
from apportion.errors import CheckpointError
from apportion.parallel.replica.resync import broadcast_state
from apportion.runtime.checkpoint.code_ownership import factory_of
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.checkpoint.validation import mark_of
from apportion.runtime.worker.job import Job


def open_directory(
    job: Job, world: World, workload: Workload, step: Step, proof: Mapping[str, Any] | None
) -> RunDirectory | None:
    """Opens the run directory on rank 0, which keeps it; returns None on the other ranks, and where there is none.
    After a change of the membership no other rank writes it from then on; where rank 0 is on another host by then,
    which does not see it, it is begun there."""
    if job.run_dir is None or world.rank != 0:
        return None
    directory = RunDirectory(job.run_dir)
    if world.generation:
        if world.meeting is not None and not (directory.path / "run.json").exists():
            directory.start(_description(job, workload, step, world, step.fingerprint(workload), proof))
        _claim(directory, world)
    return directory


def _claim(directory: RunDirectory, world: World) -> None:
    """Keeps out other starts of a run on several hosts, and who was rank 0 before; where the run has begun here."""
    if world.meeting is not None and (directory.path / "run.json").exists():
        directory.claim(os.environ["TORCHELASTIC_RUN_ID"], world.generation)


@collective
def open_copy(
    job: Job,
    directory: RunDirectory | None,
    workload: Workload,
    step: Step,
    world: World,
    proof: Mapping[str, Any] | None,
) -> RunDirectory | None:
    """Returns the run directory that this rank writes: rank 0's own, or, on as many other hosts as the policy says, one
    for the same checkpoints; those of one disk have one of them. ``directory``: what this rank has written so far.
    Called by all ranks, after rank 0 has begun its own. Raises ValueError where another run is in that place; a host
    that keeps copies only since another one was lost does without then."""
    if job.run_dir is None or job.policy.copies == 1 or world.local_size == world.size:
        return directory
    first = keepers(world.hosts(), job.policy.copies)
    mark = broadcast_message(mark_of(job.run_dir) if world.rank == 0 else None, world.group(), device=world.device)
    if world.rank not in first or mark_of(job.run_dir) == mark:
        return directory if world.rank == 0 else None
    if directory is not None:
        return directory
    try:
        return _begun_copy(job, workload, step, world, proof)
    except (ValueError, CheckpointError) as error:
        if not world.generation:
            raise
        warnings.warn(f"rank {world.rank} keeps no copy of the checkpoints: {error}", stacklevel=2)
        return None


def _begun_copy(
    job: Job, workload: Workload, step: Step, world: World, proof: Mapping[str, Any] | None
) -> RunDirectory:
    assert job.run_dir is not None
    own, mark = RunDirectory(job.run_dir), step.fingerprint(workload)
    if (own.path / "run.json").exists() and (job.resume or world.generation):
        check_fingerprint(own.read_run().get("fingerprint", {}), mark)
    else:
        own.start(_description(job, workload, step, world, mark, proof))
    _claim(own, world)
    return own


def keepers(hosts: Sequence[int], copies: int) -> list[int]:
    """Returns the ranks that write checkpoints: the first of each of the first ``copies`` hosts. ``hosts``: the number
    of each rank's host."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)][:copies]


@collective
def restore(
    job: Job,
    directory: RunDirectory | None,
    workload: Workload,
    step: Step,
    world: World,
    proof: Mapping[str, Any] | None,
) -> float | None:
    """Starts the run directory, or loads its last checkpoint into the step, also where all ranks begin again after a
    loss; returns the best value of the metric so far. Called by all ranks."""
    if job.run_dir is None:
        return None
    state, resumes = None, job.resume or world.generation > 0
    if directory is not None:
        mark = step.fingerprint(workload)
        if resumes:
            check_fingerprint(directory.read_run().get("fingerprint", {}), mark)
        else:
            directory.start(_description(job, workload, step, world, mark, proof))
        _claim(directory, world)
        # An empty directory on this host is not a fresh run where another host has saved steps of it.
        if not directory.steps() and world.place is not None and world.place.saved:
            raise CheckpointError(
                f"{directory.path} holds no checkpoint: those of the run were on a host that is lost; "
                "policy(copies=2) keeps them on a second host, too"
            )
        if resumes and directory.steps():  # else it was cut off before its first checkpoint, and begins again
            state = directory.resume(mark)
    if not resumes:
        return None
    # Rank 0 alone may see the disk of the run directory.
    state = broadcast_state(state, world.group(), device=world.device)
    if state is None:
        return None
    step.load_state_dict(state)
    best: float | None = state.settings.get("best")
    return best


def _description(
    job: Job, workload: Workload, step: Step, world: World, mark: Mapping[str, Any], proof: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "address": job.address,
        **({} if isinstance(job.workload, str) else {"factory": factory_of(workload.model)}),
        "strategy": str(job.strategy),
        "launcher": job.launcher,
        "policy": str(job.policy),
        "changes": dict(job.changes),
        "fingerprint": dict(mark),
        "count": description_of(workload.count, step.source.count),
        "proof": proof,
        "cuts": cuts_of(step, world),
    }


def strategy_of(job: Job, world: World) -> Strategy:
    """Returns the job's strategy as this rank builds it. A run that goes on cuts its network where it has cut it
    before: what a layer draws follows the stage that it is in, and the times by which a new cut would be found are
    never the same. Rank 0 decides for all ranks."""
    if job.run_dir is None or world.rank != 0 or not (job.resume or world.generation):
        return job.strategy
    return cut_at(job.strategy, RunDirectory(job.run_dir).recorded_cuts(str(job.strategy), world.size))


def cuts_of(step: Step, world: World) -> dict[str, Any] | None:
    """Returns where the network is cut into stages, as plain JSON for ``run.json`` and checkpoints; None where it is
    not."""
    return {"workers": world.size, "before": list(step.cuts)} if step.cuts else None
