"""Removes the shared memory of processes that are killed, and so do not remove it, where /dev/shm is not private."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable

from apportion.script_check.sandbox.mounts import SHARED_MEMORY

_MAPPED = re.compile(rf"(\d+) +{SHARED_MEMORY}/")
"""The number of a file's inode in a line of a process's maps. The C library makes a semaphore under another name than
the one by which it is found, so only the number identifies it."""


def existing() -> set[str]:
    """Returns the names of all shared memory."""
    return set(os.listdir(SHARED_MEMORY)) if os.path.isdir(SHARED_MEMORY) else set()


def mapped(pids: Iterable[int]) -> set[str]:
    """Returns the names of the shared memory that processes use now: semaphores and memory of multiprocessing, torch
    and others."""
    inodes, found = set[int](), set[str]()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
            inodes.update(map(int, _MAPPED.findall(file.read())))
    for name in existing() if inodes else ():
        with contextlib.suppress(OSError):  # removed by now
            if os.stat(os.path.join(SHARED_MEMORY, name)).st_ino in inodes:
                found.add(name)
    return found


def abandoned(names: Iterable[str]) -> set[str]:
    """Returns those of some names that bear the number of a process that has ended, as torch and OpenMP name theirs."""
    numbers = {name: re.match(r"(?:torch|__KMP_REGISTERED_LIB)_(\d+)_", name) for name in names}
    return {name for name, number in numbers.items() if number and not os.path.exists(f"/proc/{number[1]}")}


def remove(names: Collection[str]) -> None:
    """Remove shared memory by its names."""
    for name in names:
        with contextlib.suppress(OSError):  # of another user, or removed by now
            os.unlink(os.path.join(SHARED_MEMORY, name))
