"""Lets the driver ask a rank where it is: a signal has the Python stacks of all its threads written to a file.

The signal's handler is written in C and needs no lock of the interpreter, so it answers also while the main thread
waits inside of torch.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

from apportion.script_check.recording.recorder import Recorder

SIGNAL: int = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2
"""A signal that neither scripts nor schedulers of clusters use."""


def file_of(record: Path, rank: int) -> Path:
    """Returns the file to which a rank writes its stacks."""
    return record / f"rank{rank}.stacks"


def install(recorder: Recorder) -> None:
    """Answer the signal for the rest of the process."""
    file = file_of(Path(str(recorder.plan["record"])), recorder.rank).open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    recorder.files.append(file)
