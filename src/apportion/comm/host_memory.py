"""Memory that the ranks of one host share where no supervisor hands it out: torchrun, a script of one's own.

::

    rank 0   a file in memory that has no path  -- process, descriptor, name -->  the others open it through /proc
    all      was it opened everywhere? is it faster than what the ranks have?  -> the same answer on each

Nothing has a name in /dev/shm, and the memory goes with the last process that maps it. Where it cannot be had (several
hosts, macOS, another user's processes) the ranks keep what they have.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import time

import numpy as np
import torch

from apportion.comm import p2p
from apportion.comm.barrier import DEADLINE_SECONDS
from apportion.comm.channel import memory_file
from apportion.comm.group import Group, broadcast_message, collective
from apportion.comm.shared_memory_group import SharedMemoryGroup, links_in, nbytes

MEASURED_BYTES = 64 << 10, 1 << 20
"""The sizes in bytes of the messages that two groups are compared with."""
ROUNDS = 5


@collective
def host_memory(group: Group, *, spins: bool = True, deadline: float = DEADLINE_SECONDS) -> SharedMemoryGroup | None:
    """Make a group of the same ranks whose collectives go through shared memory; None where not every rank can map it.
    Called by all ranks of the group.

    ``spins``: has every rank a core of its own? ``deadline``: seconds that a rank may keep the others waiting.
    """
    size = nbytes(group.size)
    memory = shared_memory(group, size + group.size**2 * p2p.nbytes)
    if memory is None:
        return None
    found = SharedMemoryGroup(
        memory[:size], group.rank, group.size,
        spins=spins, deadline=deadline, all_waits=group.all_waits, links=links_in(memory[size:], group.size),
    )  # fmt: skip
    group.keep(found)
    return found


@collective
def shared_memory(group: Group, size: int) -> memoryview | None:
    """Make shared memory of this many bytes, zeros at first, that every rank of the group maps; None where not every
    rank can. Called by all ranks of the group."""
    descriptor, token = _made(size) if group.rank == 0 else (-1, "")
    try:
        pid, number, token = broadcast_message([os.getpid(), descriptor, token], group)
        # Every rank takes part in what follows, also one that could not open the file: it would otherwise leave the
        # others in the sum, which tells all of them alike whether the memory is used.
        own = descriptor if group.rank == 0 else _opened(pid, number, token)
        memory = _mapped(own, size)
        if own >= 0 and own != descriptor:
            os.close(own)  # the mapping stays
        mapped = torch.tensor([0.0 if memory is None else 1.0])
        group.all_reduce(mapped).wait()  # only then rank 0 may close what the others open
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return None if memory is None or mapped.item() != group.size else memoryview(memory)


def _made(size: int) -> tuple[int, str]:
    """Return a descriptor of so much new memory and its name; -1 where there is none to be had."""
    token = secrets.token_hex(16)
    try:
        descriptor = memory_file(token)
        os.ftruncate(descriptor, size)
    except OSError:
        return -1, token
    return descriptor, token


def _opened(pid: int, number: int, token: str) -> int:
    """Open a descriptor of another process in this one; -1 where it is not the file meant: on another host the same
    numbers may stand for a different file."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        if token not in os.readlink(path):
            return -1
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _mapped(descriptor: int, size: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(descriptor, size) if descriptor >= 0 else None
    except OSError:
        return None


def is_faster(one: Group, other: Group) -> bool:
    """Is ``one`` the faster of two groups of the same ranks? It is measured in some milliseconds, in turn, with the
    same answer on every rank."""
    ratio = 0.0
    for size in MEASURED_BYTES:
        tensor = torch.zeros(size // 4)
        # The groups take turns, so that what else the machine does slows both; the first round, which connects and maps
        # pages, is left out.
        rounds = [(_seconds(one, tensor), _seconds(other, tensor)) for _ in range(1 + ROUNDS)]
        ones, others = zip(*rounds[1:], strict=True)
        ratio += math.log(np.median(ones) / np.median(others))
    total = torch.tensor([ratio], dtype=torch.float64)
    # Each rank has measured other seconds: only their sum, by one of the groups, gives all ranks the same answer.
    # Different answers would have ranks wait in different groups.
    other.all_reduce(total).wait()
    return total.item() < 0.0


def _seconds(group: Group, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    group.all_reduce(tensor).wait()
    return time.perf_counter() - began
