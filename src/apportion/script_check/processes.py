"""What the processes of ranks are doing, from Linux's /proc: whether one computes, or waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = "apportion.script_check.recording.main"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Activity:
    """What a rank's process and its children have done so far. ``ticks``: CPU time, in the clock ticks of the kernel;
    ``transferred``: bytes read and written; ``ready``: the CPU time of each thread that runs or is ready to run;
    ``blocked``: threads that wait for a disk."""

    ticks: int
    transferred: int
    ready: Mapping[str, int]
    blocked: int = 0

    def since(self, before: Activity, *, spare: bool) -> bool:
        """Whether a processor or a disk was used after ``before``, or is waited for. ``spare``: whether a processor of
        the machine was idle meanwhile; a thread that is ready and then has had no CPU time only seems to be, as those
        do that wait in epoll on some virtual machines."""
        # One tick may be that of a timer, which wakes a thread that waits on at once.
        if self.ticks - before.ticks > 1 or self.transferred > before.transferred or self.blocked:
            return True
        return any(not spare or ticks > before.ready.get(thread, ticks) for thread, ticks in self.ready.items())


@dataclass(frozen=True)
class ProcessorTimes:
    """The clock ticks of all processors of the machine so far, and those in which they were idle."""

    total: int
    idle: int

    def spare(self, before: ProcessorTimes) -> bool:
        """Whether half of a processor or more was idle after ``before``."""
        idle, total = self.idle - before.idle, self.total - before.total
        return total > 0 and 2 * (os.cpu_count() or 1) * idle >= total


def processor_times() -> ProcessorTimes:
    """Returns the times of the machine's processors; zeros where /proc is missing, where none seems to be idle."""
    try:
        fields = list(map(int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]))
        return ProcessorTimes(sum(fields), fields[3])
    except (OSError, IndexError, ValueError):
        return ProcessorTimes(0, 0)


def rank_processes(roots: Sequence[int]) -> dict[int, int]:
    """Returns the process of each rank, by rank: those of the program that records, among some processes and their
    descendants. Empty where /proc is missing."""
    found = dict[int, int]()
    for root in roots:
        for pid in family(root):
            rank = _rank_of(pid)
            if rank is not None:
                found.setdefault(rank, pid)  # a parent comes before its children, such as forked loader processes
    return found


def activity(pid: int) -> Activity | None:
    """Returns what a process and its descendants have done; None where it has ended or /proc is missing."""
    ticks = transferred = blocked = 0
    ready = dict[str, int]()
    seen = False
    for each in family(pid):
        for thread in _names(_PROC / str(each) / "task"):
            try:
                fields = (_PROC / str(each) / "task" / thread / "stat").read_text().rpartition(")")[2].split()
            except (OSError, ValueError):
                continue
            seen = seen or fields[0] not in "ZX"
            used = int(fields[11]) + int(fields[12])
            if fields[0] == "R":
                ready[thread] = used
            blocked += fields[0] == "D"
            ticks += used
        transferred += _transferred(each)
    return Activity(ticks, transferred, ready, blocked) if seen else None


def handles(pid: int, signal: int) -> bool:
    """Returns whether a process handles a signal, so that it does not end by it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return not _PROC.exists()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal - 1) & 1)


def family(pid: int) -> Iterator[int]:
    """A process and its descendants, parents first."""
    waiting = [pid]
    while waiting:
        each = waiting.pop(0)
        yield each
        for thread in _names(_PROC / str(each) / "task"):
            try:
                waiting += map(int, (_PROC / str(each) / "task" / thread / "children").read_text().split())
            except OSError:
                continue


def _rank_of(pid: int) -> int | None:
    folder = _PROC / str(pid)
    try:
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if _PROGRAM not in arguments or Path(arguments[0]).name != Path(sys.executable).name:
            return None  # also a program that runs the interpreter with this argument
        variables = dict(each.partition(b"=")[::2] for each in (folder / "environ").read_bytes().split(b"\0"))
        return int(variables[b"RANK"])
    except (OSError, KeyError, ValueError):
        return None


def _transferred(pid: int) -> int:
    try:
        lines: Mapping[str, str] = dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
        return int(lines["read_bytes"]) + int(lines["write_bytes"])
    except (OSError, KeyError, ValueError):
        return 0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
