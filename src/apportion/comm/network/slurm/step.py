"""The step of a job that srun has started: what its tasks find in their environment.

Its first node is where task 0 runs. The ports follow from the numbers of the job and the step: another run may have
taken the first one already, so that rank 0 takes the next that is free, and the others look for it there.
"""

from __future__ import annotations

from collections.abc import Mapping

from apportion.comm.network.slurm.node_list import node_names

PLACE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
"""The names by which srun calls RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
FIRST_PORT, PORTS = 15_000, 10_000
"""The ports of all jobs: below those that a system gives to whoever asks for any, and above those of services."""
TRIES = 8
"""The number of ports that a step tries."""


def nodes(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the step's nodes; none where Slurm has not said them, or in a way that is not known here:
    then MASTER_ADDR has to be set."""
    try:
        return node_names(environment.get("SLURM_STEP_NODELIST", ""))
    except ValueError:
        return []


def first_port(environment: Mapping[str, str]) -> int | None:
    """Returns the first port that rank 0 tries; None where Slurm has not said which job this is."""
    try:
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    except (KeyError, ValueError):
        return None
    return FIRST_PORT + (job * TRIES + step) % PORTS


def name(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what tells this step from others, and a start of it from those before."""
    return tuple(environment.get(key, "") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))


def refuse_outside(environment: Mapping[str, str]) -> None:
    """Raises ValueError in the batch script of a job of several tasks, outside any step: it would train alone there,
    while the job's other tasks are never started."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" not in environment and tasks != "1":
        raise ValueError(
            f"SLURM_NTASKS={tasks}, but this process runs in the job's batch script, which is one process on its first "
            "node: write srun before the command, which starts all tasks"
        )
