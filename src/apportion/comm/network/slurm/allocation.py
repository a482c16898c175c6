"""The allocation of a job: the nodes that Slurm has given it, as a program finds them that starts steps there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from apportion.comm.network.slurm.node_list import node_names

_KEPT = ("SLURM_ARRAY_", "SLURM_CLUSTER", "SLURM_CONF", "SLURM_JOB_", "SLURM_JWT", "SLURM_RESTART_", "SLURM_SUBMIT_")
"""What variables begin with that say where a job is, or how Slurm is reached. All others are options of srun's as well:
those of a job would be taken for options of each of its steps."""
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def allocated(environment: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Returns the name of every node of the allocation that this process is in, its own node first, and the number of
    tasks that were asked for there; None where none was. Raises ValueError outside an allocation, and in a task of
    several, each of which would start the same run."""
    if not environment.get("SLURM_JOB_ID") or not environment.get("SLURM_JOB_NODELIST"):
        raise ValueError(
            "slurm() starts ranks on the nodes of an allocation, and SLURM_JOB_ID is not set here: put the command "
            "into a file for sbatch, or type it in the shell that `salloc --nodes=2` gives"
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise ValueError(
            f"slurm() starts all ranks from one process, and this is one of {tasks} tasks that srun has started: leave "
            "srun out, or say launcher=env"
        )
    nodes = node_names(environment["SLURM_JOB_NODELIST"])
    found = list(zip(nodes, _tasks(environment, len(nodes)), strict=True))
    own = environment.get("SLURMD_NODENAME")
    return sorted(found, key=lambda node: node[0] != own)


def _tasks(environment: Mapping[str, str], nodes: int) -> list[int | None]:
    """Returns the tasks of each node, written as ``2(x3),1``, where the job has said how many it wants."""
    asked = environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE")
    if not asked or "SLURM_STEP_ID" in environment:  # a step has numbers of its own
        return [None] * nodes
    text = environment.get("SLURM_TASKS_PER_NODE", "")
    found: list[int | None] = []
    for each in text.split(","):
        match = _COUNT.fullmatch(each)
        found += [int(match[1])] * int(match[2] or 1) if match is not None else []
    return found if len(found) == nodes else [None] * nodes


def environment_of_steps(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for an srun that takes no option but those that it is given."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SRUN_")) or name.startswith(_KEPT)
    }
