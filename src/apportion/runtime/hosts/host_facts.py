"""The facts that a host sends of itself before anything starts there, and whether hosts with such facts can train
together."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from apportion.comm.network.address import route_to
from apportion.process import usable_cores
from apportion.runtime.agents.agent_command import HOST_CORES, REACHED_FROM
from apportion.runtime.proof.installed_packages import own_contents

Facts = Mapping[str, Any]
"""The facts of a host, as plain JSON: its ``hostname``, ``cores``, ``gpus``, ``address``, ``python`` (the path), and
the versions by name."""
VERSIONS = ("Python", "torch", "apportion")
"""What must be the same on all hosts."""
ALIKE = "numpy"
"""What must be of the same major and minor version: another patch computes the same, and is warned of."""
MOST_RANKS = 1000
"""The largest number of ranks of a host, also where it has more cores."""
NONE = "none"
"""The version of a package that is not installed."""
_GPU_SECONDS = 60.0
_COUNT = "import torch; print(torch.cuda.device_count())"


def versions() -> dict[str, str]:
    """Returns the versions that hosts compare, as they are here. Nothing heavy is imported for it."""
    installed = {name: _version(name) for name in ("torch", ALIKE)}
    return {"Python": platform.python_version(), **installed, "apportion": own_contents()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NONE


def describe_host() -> dict[str, Any]:
    """Returns the facts of this host."""
    return {
        "hostname": socket.gethostname(),
        "cores": own_cores(os.environ),
        "gpus": _gpus(),
        "address": own_address(os.environ),
        "python": sys.executable,
        "versions": versions(),
    }


def own_cores(environment: Mapping[str, str]) -> int:
    """Returns the number of cores of this host that ranks may use: those of this process, and no more than the run was
    given here."""
    given = environment.get(HOST_CORES, "")
    return min(usable_cores(), int(given)) if given.isdecimal() and int(given) else usable_cores()


def own_address(environment: Mapping[str, str]) -> str:
    """Returns the address of this host by which other hosts of the run reach it: the one by which it reaches the host
    that the launcher has named, else the one that sshd says the driver has reached. A job's variables may hold what
    sshd has said at a login."""
    if other := environment.get(REACHED_FROM):
        return route_to(other)
    words = environment.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else "127.0.0.1"


def refuse_unlike(here: Mapping[str, str], hosts: Sequence[tuple[str, Facts]], device: str | None) -> None:
    """Raises ValueError where a host has other versions than this one (of numpy another major or minor one), or where
    some have GPUs to train on and others none. ``here``: the versions of this host; ``hosts``: the name and the facts
    of each host."""
    for name, facts in hosts:
        for what in (*VERSIONS, ALIKE):
            mine, other = here.get(what, NONE), str(facts["versions"].get(what, NONE))
            if mine != other and (what != ALIKE or _minor(mine) != _minor(other)):
                is_none = f"has no {what}" if other == NONE else f"has {what} {other}"
                raise ValueError(
                    f"host {name} {is_none} ({facts['python']}), and this one has {what} {mine}: install the same "
                    "there, or name an interpreter that has it with python="
                )
    with_gpus = [name for name, facts in hosts if facts["gpus"]]
    without = [name for name, facts in hosts if not facts["gpus"]]
    if device != "cpu" and with_gpus and without:
        raise ValueError(
            f"host {with_gpus[0]} has GPUs and host {without[0]} none, and their ranks cannot talk: say "
            "device='cpu', or name only hosts that have some"
        )


def unlike_patches(here: Mapping[str, str], hosts: Sequence[tuple[str, Facts]]) -> list[str]:
    """Returns a warning for each host whose numpy has another patch version than this one's."""
    mine = here.get(ALIKE, NONE)
    others = [(name, facts["versions"].get(ALIKE, NONE)) for name, facts in hosts]
    return [
        f"host {name} has {ALIKE} {other}, and this one has {ALIKE} {mine}: the run goes on; install the same there "
        "where results must have the same bits"
        for name, other in others
        if other != mine
    ]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def ranks_of(facts: Facts, workers: int | None, device: str | None) -> int:
    """Returns the number of ranks of a host: as many workers as were asked for, else one a GPU, or one a core."""
    if workers is not None:
        return workers
    return min(MOST_RANKS, int((facts["gpus"] if device != "cpu" else 0) or facts["cores"]))


def overload(name: str, facts: Facts, ranks: int, each: int) -> str | None:
    """Returns a warning where a host has more runnable threads than cores, else None. ``each``: the threads and
    loaders of a rank."""
    cores = int(facts["cores"])
    if ranks * each <= cores or facts["gpus"]:
        return None
    return (
        f"host {name} has {ranks} workers x {each} threads and loaders on {cores} cores: they take turns, and the run "
        f"gets slower; give it {max(1, cores // each)} of them"
    )


def _gpus() -> int:
    """Returns how many GPUs torch sees; torch is asked only where the system has a driver for some."""
    if not Path("/proc/driver/nvidia/gpus").exists():
        return 0
    try:
        counted = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_GPU_SECONDS)
        return int(counted.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0
