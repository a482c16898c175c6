"""The Python stacks of processes that do not get on, printed by themselves: no thread of theirs has to answer."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress

PRINT_SECONDS = 0.05
"""The seconds that a process is given to print its stacks before the next one does."""
_waits = threading.Event()  # never set


def print_stacks_on_signal() -> None:
    """Has this process, and what is forked from it, print the stacks of all its threads to standard error on SIGUSR2,
    also while it is in a call that does not return."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def tell_to_print_stacks(pids: Iterable[int | None]) -> None:
    """Has processes print the stacks of their threads, one after the other, as far as they do that on SIGUSR2. None is
    one that has not begun."""
    for pid in pids:
        if pid is not None and _handles(pid, signal.SIGUSR2):
            with suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
            # Stacks that are printed at once would mix line by line on the terminal.
            _waits.wait(PRINT_SECONDS)


def _handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal, which ends it otherwise. Known on Linux alone."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                # A signal without a handler would end the process, so that the mask of caught signals is read first.
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
