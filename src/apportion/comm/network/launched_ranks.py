"""What launchers say to a rank about its place, and what ranks find out about their hosts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.comm.network import slurm

if TYPE_CHECKING:
    import torch

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OTHER_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    slurm.STEP_VARIABLES,
)
"""The names by which mpirun and srun call RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. In a job of Slurm's mpirun
starts a program of its own on each node by srun, whose numbers its ranks find as well."""
Slot = tuple[str, int, int]
"""Where a rank runs: its host, LOCAL_RANK and LOCAL_WORLD_SIZE."""


def given(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the five variables and LOCAL_WORLD_SIZE, as far as they are set or follow from what is, under torchrun's
    names or another launcher's."""
    found = {name: environment[name] for name in (*NAMES, "LOCAL_WORLD_SIZE") if environment.get(name)}
    names = _names(environment)
    if names is None:
        return found
    rank, size, local_rank, local_size = names
    found |= {"RANK": environment[rank], "WORLD_SIZE": environment[size]}
    found |= {"LOCAL_RANK": environment[local_rank]} if local_rank in environment else {}
    tasks = [int(n) for n in re.findall(r"(?:^|,)(\d+)", environment.get(local_size, ""))]  # Slurm: 2(x3),1
    found |= {"LOCAL_WORLD_SIZE": str(max(tasks))} if len(set(tasks)) == 1 else {}
    if names == slurm.STEP_VARIABLES:
        port, nodes = slurm.first_port(environment), slurm.step_nodes(environment)
        known = {"MASTER_ADDR": nodes[0]} if nodes else {}
        known |= {"MASTER_PORT": str(port)} if port is not None else {}
        found = {**known, **found}
    return found


def refuse_unstarted(environment: Mapping[str, str]) -> None:
    """Raises ValueError where a launcher has been asked for several ranks, and this process is none that it started."""
    if not environment.get("WORLD_SIZE") and _names(environment) is None:
        slurm.refuse_outside(environment)


def _names(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the names that a launcher other than torchrun has used; None where there is none."""
    if environment.get("WORLD_SIZE"):
        return None
    return next((names for names in _OTHER_NAMES if names[0] in environment and names[1] in environment), None)


def ports(environment: Mapping[str, str]) -> list[int]:
    """Returns the ports at which rank 0 may listen, in the order in which it tries them: MASTER_PORT alone, or those of
    a step of Slurm's where that is the first of them."""
    port = int(environment["MASTER_PORT"])
    if _names(environment) == slurm.STEP_VARIABLES and port == slurm.first_port(environment):
        return list(range(port, port + slurm.TRIES))
    return [port]


def other_hosts(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the hosts that rank 0 does not run on, where the launcher has said them."""
    return slurm.step_nodes(environment)[1:] if _names(environment) == slurm.STEP_VARIABLES else []


def run_name(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what tells this start of this run from others."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    own = tuple(environment.get(name, "") for name in names)
    return own + slurm.step_name(environment) if _names(environment) == slurm.STEP_VARIABLES else own


def number(name: str, text: str) -> int:
    """Returns a variable that must be a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a whole number") from None


def host_key() -> str:
    """Returns what tells this host from others: its name, this start of its system, and the namespaces of its network
    and its processes. Two containers of one machine are two hosts."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    except OSError:  # not Linux: the name has to do
        pass
    return "/".join(parts)


def hosts(slots: Sequence[Slot]) -> list[int]:
    """Returns the host of every rank, numbered in the order in which they come. Several starts on one host may stand
    for several hosts, and then each has every local rank once."""
    taken: list[tuple[str, set[int]]] = []
    found = []
    for name, local_rank, local_size in slots:
        free = (at for at, (n, ranks) in enumerate(taken) if n == name and local_rank not in ranks)
        place = next((at for at in free if len(taken[at][1]) < local_size), len(taken))
        if place == len(taken):
            taken.append((name, set()))
        taken[place][1].add(local_rank)
        found.append(place)
    return found


def count_ranks(reports: Sequence[tuple[str, int]], rank: int) -> int:
    """Returns the number of ranks on the host of a rank. ``reports``: the host and LOCAL_RANK of every rank. Raises
    ValueError, for every rank alike, where the ranks of a host are not numbered from 0 on."""
    numbers: dict[str, list[int]] = {}
    for key, local_rank in reports:
        numbers.setdefault(key, []).append(local_rank)
    for key, local_ranks in numbers.items():
        if sorted(local_ranks) != list(range(len(local_ranks))):
            raise ValueError(
                f"the {len(local_ranks)} ranks on host {key.split('/')[0]} were given LOCAL_RANK={local_ranks}: they "
                f"must be 0 to {len(local_ranks) - 1}, each once"
            )
    return len(numbers[reports[rank][0]])


def refuse_contradictions(slots: Sequence[Slot]) -> None:
    """Raises ValueError where the numbers that the ranks were given are not those of ranks on hosts."""
    of = hosts(slots)
    for rank, (name, local_rank, local_size) in enumerate(slots):
        there = [other for other, host in enumerate(of) if host == of[rank]]
        local_ranks = sorted(slots[other][1] for other in there)
        if local_ranks != list(range(local_size)):
            host = name.split("/")[0]
            raise ValueError(
                f"rank {rank} on host {host} was given LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size}, and "
                f"the ranks there are {there} with LOCAL_RANK={local_ranks}: they must be 0 to LOCAL_WORLD_SIZE-1, "
                "each once; start the ranks with torchrun, or leave LOCAL_WORLD_SIZE out, and it is found out"
            )


def device(asked: str | None, local_rank: int) -> torch.device:
    """Returns the device of a rank: "cpu", "cuda", or (None) a GPU where there are any, which the ranks of a host share
    in turn where there are fewer. Raises ValueError where there is no such device."""
    import torch  # the command line asks for the rest of this alone

    if asked not in (None, "cpu", "cuda"):
        raise ValueError(f'device={asked!r} must be "cpu" or "cuda"')
    gpus = torch.cuda.device_count() if asked != "cpu" else 0
    if asked == "cuda" and gpus == 0:
        raise ValueError('device="cuda" but torch sees no GPU: use device="cpu", or install a CUDA build of torch')
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
