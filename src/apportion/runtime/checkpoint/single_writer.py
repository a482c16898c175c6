"""One training at a time writes a run directory: a lock of the system keeps others out, and ends with its holder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.append_only_file import open_own, reason

LOCK = ".training"
"""The file in the run directory that is locked. It holds the process's number, for a process that finds it locked."""


_LOOK_SECONDS = 0.05


@contextmanager
def single_writer(run_dir: str | Path, *, seconds: float = 0.0) -> Iterator[None]:
    """Lets this process alone write a run directory; the folder is made, and goes again where nothing was written.
    Raises ValueError where another training writes it, and goes on doing so for so many seconds; CheckpointError where
    it cannot be made."""
    folder = Path(run_dir).absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    opened: list[int] = []
    try:
        _open_locked(folder, time.monotonic() + seconds, opened)
        with suppress(OSError):  # a full disk
            os.ftruncate(opened[-1], 0)
            os.pwrite(opened[-1], str(os.getpid()).encode(), 0)
        yield
    finally:  # also where Ctrl-C has come between two lines from above
        _clear(folder, made, opened)
        for descriptor in opened:
            os.close(descriptor)


def _open_locked(folder: Path, end: float, opened: list[int]) -> None:
    """Opens the file of the lock, as the last of ``opened``, and locks it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            opened.append(open_own(folder / LOCK, os.O_RDWR | os.O_CREAT))
        except FileNotFoundError:  # another one has cleared it away meanwhile
            continue
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {reason(error)}; make it writable, or use another --run-dir"
            ) from error
        while not _lock(opened[-1], folder, wait=time.monotonic() < end):
            time.sleep(_LOOK_SECONDS)
        if os.fstat(opened[-1]).st_nlink:
            return
        os.close(opened.pop())  # of a file that its holder has cleared away: this lock keeps nobody out


def _lock(descriptor: int, folder: Path, *, wait: bool) -> bool:
    """Locks a file, and returns whether that was possible. Raises ValueError where it was not and nobody waits."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait:
            return False
        holder = os.pread(descriptor, 20, 0).decode(errors="replace")
        who = f"process {holder}" if holder.isdecimal() else "another process"
        raise ValueError(
            f"{folder} is being written by another training ({who}): wait for its end, or give each run its own "
            "--run-dir"
        ) from None
    except OSError:
        pass  # a file system without locks: nothing to hold on to
    return True


def _clear(folder: Path, made: Sequence[Path], opened: list[int]) -> None:
    """Remove the folders that were made, the innermost first, where nothing was written into them and no other training
    has the lock."""
    if not made:
        return
    with suppress(OSError):
        if not opened and (folder / LOCK).exists():  # Ctrl-C came while it was opened
            opened.append(open_own(folder / LOCK, os.O_RDWR))
        there = opened and os.fstat(opened[-1]).st_nlink
        if there and _lock(opened[-1], folder, wait=True) and os.listdir(folder) == [LOCK]:
            os.unlink(folder / LOCK)
        for path in made:
            os.rmdir(path)
