"""What a side has used of the processors: itself, its threads, and the processes that it has started."""

import contextlib
import os
import time
from pathlib import Path


def descendants(pid):
    """The processes that this one has started, and theirs."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def cpu_seconds():
    """Seconds of processor time of this process and of all that it has started and that still run."""
    seconds = time.process_time()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime((~pid << 3) | 2)  # Linux's own number of the clock of a process
    return seconds


class Stretch:
    """What happens between two moments: frames, seconds, and seconds of processor time."""

    def __init__(self):
        self._cpu, self._began = cpu_seconds(), time.perf_counter()

    def said(self, frames, *more):
        """What a side answers."""
        wall, cpu = time.perf_counter() - self._began, cpu_seconds() - self._cpu
        return " ".join(map(str, (float(frames), wall, cpu, *more)))
