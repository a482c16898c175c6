"""Functions for processes: to end when the parent does, to outlive a signal for a while, to take in orphans, to tell
what state one is in, to keep or give back memory, to count cores."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
"""The folder of this package's own code."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends (Linux; elsewhere a closed socket or pipe tells it)."""
    if sys.platform == "linux":
        # The order matters: ask first, then look whether the parent is still there. A parent that ended before the
        # request sends no signal.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


OUTLIVES_SECONDS = 10.0
"""The seconds for which a process outlives SIGTERM where others are to decide: a run saves and ends in less."""


def in_slurm_job(environment: Mapping[str, str]) -> bool:
    """Whether a process is in a job of Slurm's, which signals all processes of a step, or of a batch script, at
    once."""
    return bool(environment.get("SLURM_JOB_ID"))


def outlive_notice() -> None:
    """Have SIGTERM and SIGHUP end this process only after OUTLIVES_SECONDS, and SIGUSR1 never where Slurm sends it. For
    processes that get signals which are meant for the process that has started them, which ends them earlier. Where
    SIGHUP is ignored it stays so."""
    signal.signal(signal.SIGTERM, _end_later)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _end_later)
    if in_slurm_job(os.environ):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_later(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    later = threading.Timer(OUTLIVES_SECONDS, _end_by, (number,))
    later.daemon = True
    later.start()


def _end_by(number: int) -> None:
    """End this process by a signal that it ignores, from any thread."""
    # By the C library: Python allows signal.signal in the main thread alone, and this is a timer's.
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)


def take_orphans_in() -> None:
    """Make this process the parent of its descendants whose own parent ends, from here on (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger. Known on Linux; False elsewhere."""
    return _state(pid) in ("T", "t")


def is_alive(pid: int) -> bool:
    """Whether a process runs, or may run again. Known on Linux; True elsewhere."""
    state = _state(pid)
    return state not in ("Z", "X") if state is not None else not os.path.exists("/proc/self")


def _state(pid: int) -> str | None:
    """The letter that Linux has for what a process does; None where there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of a program may hold spaces and parentheses: the state follows the last one.
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def seconds_with_core() -> float:
    """Returns the seconds of a clock without those in which this thread could have gone on and had no core, because
    other programs had them (known on Linux): what something takes here, however busy the machine is."""
    waited = 0
    try:
        with open("/proc/thread-self/schedstat") as file:
            waited = int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        pass
    return time.perf_counter() - waited / 1e9


# Memory of the C library


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""The parameters of mallopt as malloc.h numbers them."""
_MOST = (1 << 31) - 1
_MORE = 1 << 28


def keep_what_is_freed() -> None:
    """Keep what a step frees for the next one, from now on.

    By default the largest blocks, and what is free at the end of the heap, go back to the system: every step then asks
    for the activations' pages again, and each is cleared and mapped when it is first written to, which can take longer
    than computing what it holds. A process has no more memory than before at its peak. Only where the C library is
    glibc; elsewhere nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MOST)
        mallopt(_TRIM_THRESHOLD, _MOST)
        mallopt(_TOP_PAD, _MORE)  # grown in large steps: address space, of which memory is taken as it is used


def return_large(nbytes: int) -> None:
    """Return a block of this many bytes or more to the system as soon as it is freed, from now on (glibc). By default
    blocks of up to 32 MiB stay with the process once one of their size has been freed, and what lies between two that
    are in use cannot be given back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, nbytes)


def give_back() -> None:
    """Give what is free by now back to the system (glibc): what was needed once, and no step asks for again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Cores


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The number of cores that this process may use: its affinity, and the smallest quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, int(quota)) for quota in _quotas())])


def _quotas() -> Iterator[float]:
    """Yields the quotas, in cores, of the control groups that this process is in, of either version of the kernel's
    interface, from the innermost to the outermost that can be seen."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in [*lines, "0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            roots, names = (CGROUPS, CGROUPS / "unified"), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            roots, names = (CGROUPS / controllers, CGROUPS / "cpu"), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        for root in roots:
            inner = Path(os.path.normpath(path.lstrip("/") or "."))
            for folder in (root / inner, *(root / parent for parent in inner.parents)):
                try:
                    quota, period = " ".join((folder / name).read_text() for name in names).split()
                    if int(quota) > 0:  # -1 in the first version: none
                        yield int(quota) / int(period)
                except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max": no quota
                    continue


def most_threads() -> int | None:
    """The most threads of a worker that the environment asks for by OMP_NUM_THREADS; None where it does not. Of a list,
    one number for each level, it is the first."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None
