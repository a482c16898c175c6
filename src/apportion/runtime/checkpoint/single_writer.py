"""One training at a time writes a run directory: a lock of the system keeps others out, and ends with its holder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.durable_files import open_own, reason

LOCK = ".training"
"""The file in the run directory that is locked. It holds the process's number, for a process that finds it locked."""


_LOOK_SECONDS = 0.05
_CROSSED_SECONDS = 1.0
"""The seconds in which a folder may go away again and again as it is made, because others end that have made it."""


@contextmanager
def single_writer(run_dir: str | Path, *, seconds: float = 0.0) -> Iterator[None]:
    """Lets this process alone write a run directory; the folder is made, and goes again where nothing was written.
    Raises ValueError where another training writes it, and still does after ``seconds``; CheckpointError where it
    cannot be made."""
    folder = _absolute(run_dir)
    opened: list[int] = []
    made: list[Path] = []
    try:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
        except OSError as error:  # a name that is too long, or a folder that may not be looked into
            raise _refused(folder, error) from error
        _open_locked(folder, time.monotonic() + seconds, opened)
        with suppress(OSError):  # a full disk
            os.ftruncate(opened[-1], 0)
            os.pwrite(opened[-1], str(os.getpid()).encode(), 0)
        yield
    finally:  # also where Ctrl-C has come between two lines from above
        _clear(folder, made, opened)
        for descriptor in opened:
            os.close(descriptor)


def _absolute(run_dir: str | Path) -> Path:
    """Returns the run directory from the root on. Raises ValueError where it has what no path may have, and
    CheckpointError where the current folder is gone."""
    text = os.fspath(run_dir)
    if "\0" in text:
        raise ValueError(f"run_dir={text!r} must be the path of a folder: run_dir='runs/first'")
    try:
        return Path(run_dir).absolute()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{text} cannot be made: the current folder has been removed; change to one that is there, or give "
            "run_dir= from the root on"
        ) from error


def _refused(folder: Path, error: OSError) -> CheckpointError:
    """Returns the error of a run directory that cannot be written, with the part of its path for which that is so."""
    why = reason(error)
    for path in (folder, *folder.parents):
        if os.path.islink(path) and not os.path.exists(path):
            why = f"{path} is a link to {os.readlink(path)}, which is not there"
        elif os.path.exists(path):
            if not os.path.isdir(path):
                why = f"{path} is not a folder"
            elif isinstance(error, FileNotFoundError):
                why = f"no folder can be made in {path} ({reason(error)})"
            break
    return CheckpointError(f"{folder} cannot be written: {why}; make it writable, or use another run_dir=")


def _open_locked(folder: Path, end: float, opened: list[int]) -> None:
    """Opens the file of the lock, as the last of ``opened``, and locks it."""
    crossed = time.monotonic() + _CROSSED_SECONDS
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            opened.append(open_own(folder / LOCK, os.O_RDWR | os.O_CREAT))
        except FileNotFoundError as error:  # another one has cleared it away meanwhile, or it cannot be made at all
            if time.monotonic() < crossed:
                time.sleep(_LOOK_SECONDS)
                continue
            raise _refused(folder, error) from error
        except OSError as error:
            raise _refused(folder, error) from error
        while not _lock(opened[-1], folder, wait=time.monotonic() < end):
            time.sleep(_LOOK_SECONDS)
        # The lock is on the inode. A holder that has removed its file between the open and the lock leaves one that no
        # other process can open by its name.
        if os.fstat(opened[-1]).st_nlink:
            return
        os.close(opened.pop())  # of a file that its holder has cleared away: this lock keeps no other process out


def _lock(descriptor: int, folder: Path, *, wait: bool) -> bool:
    """Locks a file, and returns whether that was possible. Raises ValueError where it was not and ``wait`` is False."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait:
            return False
        holder = os.pread(descriptor, 20, 0).decode(errors="replace")
        who = f"process {holder}" if holder.isdecimal() else "another process"
        raise ValueError(
            f"{folder} is being written by another training ({who}): wait for its end, or give each run its own "
            "run_dir="
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
        # Only the holder of the lock removes the file, and only where it is alone in the folder: another training may
        # be about to lock it.
        there = opened and os.fstat(opened[-1]).st_nlink
        if there and _lock(opened[-1], folder, wait=True) and os.listdir(folder) == [LOCK]:
            os.unlink(folder / LOCK)
        for path in made:
            os.rmdir(path)
