"""The folder of a run on one host, which holds its secret and its code and goes with it.

The shell that has started the agent removes it at the end. Where that was killed too, the next agent does: a folder is
one that no run needs any longer where its lock is free and it is not new.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

PATTERN = "apportion-hosts-*"
"""How the folders of runs are called (``agents/agent_command.py`` makes them)."""
LOCK = "lock"
NEW_SECONDS = 600.0
"""The seconds within which a folder may not have its lock yet."""


def lock_folder(folder: Path) -> int:
    """Locks the folder of this run for as long as this process lives. Returns the descriptor of the lock."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_leftovers(folder: Path) -> None:
    """Removes what earlier runs of this user have left beside the folder of this one."""
    for other in folder.parent.glob(PATTERN):
        with suppress(OSError):  # another agent removes it
            about = other.lstat()
            if other == folder or about.st_uid != os.geteuid() or time.time() - about.st_mtime < NEW_SECONDS:
                continue
            if _is_left(other / LOCK):
                shutil.rmtree(other)


def _is_left(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # its agent never began
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
