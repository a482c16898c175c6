"""A process that ends when its parent does; and one that orphans below it are given to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""The folder of this package's own code."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent ends (Linux; elsewhere a closed socket or pipe tells it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def take_orphans_in() -> None:
    """From here on the descendants of this process whose parent ends are its children (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
