"""Trains several runs, the members of an ensemble or of a grid, side by side where there is room.

::

    cores 0 1 2 3, 4 members      m1 on 0    m2 on 1    m3 on 2    m4 on 3
    cores 0 1,     4 members      m1 on 0, then m3      m2 on 1, then m4
    cores 0 1 2 3, 2 members      m1 on 0 1             m2 on 2 3

Each is a run of its own, by the program itself, that sees its group's cores or GPUs and no others: what it finds out
about the machine is about these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_RESTRICTED = """
import os, sys
from apportion.process import die_with_parent
die_with_parent(int(sys.argv[1]))
if sys.argv[2]:
    os.sched_setaffinity(0, set(map(int, sys.argv[2].split(","))))
os.execv(sys.executable, [sys.executable, "-m", "apportion", "train", *sys.argv[3:]])
"""


@dataclass(frozen=True)
class EnsembleGroup:
    """Devices that one member at a time is trained on."""

    cores: tuple[int, ...]
    """The cores of the group; empty where the system cannot bind processes."""
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class MemberRun:
    """One of several runs that are made side by side."""

    name: str
    """The name of the run, which is that of its folder."""
    workload: str
    """The address of its workload."""
    flags: tuple[str, ...] = ()
    """Flags of ``apportion train`` that are this member's own."""


@dataclass(frozen=True)
class Trained:
    """The run of one member."""

    member: MemberRun
    run_dir: Path
    status: int
    """The exit status of the member's run."""


def train_members(
    members: Sequence[MemberRun], run_dir: str | Path, flags: Sequence[str], say: Callable[[str], None]
) -> list[Trained]:
    """Trains these members, each in a folder of its name under ``run_dir``, in their order; those that have not begun
    when one is interrupted are left out. ``flags``: more of ``apportion train``, for all of them. ``say``: gets each
    line that a member's run says, with its name before it. All have ended afterwards, also after Ctrl-C, which they get
    as well."""
    groups = divided(_cores(), _gpus(), len(members))
    found: dict[int, Trained] = {}
    said = threading.Lock()

    def train(group: EnsembleGroup, mine: Sequence[int]) -> None:
        for n in mine:
            member, folder = members[n], Path(run_dir) / members[n].name
            command = [member.workload, "--run-dir", str(folder), *member.flags, *flags]
            with subprocess.Popen(
                [sys.executable, "-c", _RESTRICTED, str(os.getpid()), ",".join(map(str, group.cores)), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(group.gpus)} if group.gpus else {}),
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    with said:
                        say(f"{member.name}  {line.rstrip()}")
            with said:
                found[n] = Trained(member, folder, process.returncode)
            if process.returncode < 0 or process.returncode == 130:
                return  # asked to end, and so are those after it

    threads = [
        threading.Thread(target=train, args=(group, range(at, len(members), len(groups))))
        for at, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for thread in threads:
            thread.join()
        raise
    return [found[n] for n in sorted(found)]


def divided(cores: Sequence[int], gpus: Sequence[str], members: int) -> list[EnsembleGroup]:
    """Divides the devices into as many groups as there are devices for, of equal size: by GPUs where there are any,
    else by cores."""
    devices = len(gpus) or len(cores) or 1
    many = min(members, devices)
    each_core, each_gpu = max(1, len(cores) // many), len(gpus) // many
    return [
        EnsembleGroup(tuple(cores[n * each_core : (n + 1) * each_core]), tuple(gpus[n * each_gpu : (n + 1) * each_gpu]))
        for n in range(many)
    ]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _gpus() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu]
    return [str(n) for n in range(torch.cuda.device_count())]
