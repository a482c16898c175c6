"""Slurm: the allocation of a job, as a program finds it that starts steps there, and the step that srun has started, as
its tasks find it in their environment.

Task 0 runs on the first node of a step. The ports follow from the numbers of the job and the step: another run may have
taken the first one already, so that rank 0 takes the next that is free, and the others look for it there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

_PARTS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECES = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def node_names(text: str) -> list[str]:
    """Returns the names of the nodes of a list, in its order. Raises ValueError where it is none."""
    parts = _PARTS.findall(text)
    if not parts or ",".join(parts) != text:
        raise ValueError(f"{text!r} is not a list of nodes: names separated by commas, with numbers as node[1-3,07]")
    return [name for part in parts for name in _expanded(part, text)]


def _expanded(part: str, text: str) -> list[str]:
    choices = [_numbers(numbers, text) if numbers or not plain else [plain] for numbers, plain in _PIECES.findall(part)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(numbers: str, text: str) -> list[str]:
    found = []
    for each in numbers.split(","):
        match = _NUMBERS.fullmatch(each)
        if match is None:
            raise ValueError(f"[{numbers}] in the list of nodes {text!r} must hold numbers and ranges, as [1-3,07]")
        first, last = match[1], match[2] or match[1]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


_PLACE_OF_JOB = (
    "SLURM_ARRAY_",
    "SLURM_CLUSTER",
    "SLURM_CONF",
    "SLURM_JOB_",
    "SLURM_JWT",
    "SLURM_RESTART_",
    "SLURM_SUBMIT_",
)
"""The prefixes of variables that say where a job runs, or how Slurm is reached. srun reads all others as options: those
of the job would apply to each of its steps."""
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
        if not name.startswith(("SLURM_", "SRUN_")) or name.startswith(_PLACE_OF_JOB)
    }


STEP_VARIABLES = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
"""The names by which srun calls RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
FIRST_PORT, PORTS = 15_000, 10_000
"""The ports of all jobs: below the ephemeral ports of a system, and above those of services."""
TRIES = 8
"""The number of ports that a step tries."""


def step_nodes(environment: Mapping[str, str]) -> list[str]:
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


def step_name(environment: Mapping[str, str]) -> tuple[str, ...]:
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
