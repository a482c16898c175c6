"""Files that survive a crash: a file of lines that only grows, and files that are on the disk once they are written.

Lines that find no room on the disk wait in memory until there is some.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from apportion.core.event import Event, EventKind
from apportion.errors import CheckpointError

MOST_WAITING = 64 << 20
"""The number of bytes that may wait for room; further lines are counted and left out."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_AT_ONCE = 1 << 20


def open_own(path: Path, flags: int) -> int:
    """Returns the descriptor of an ordinary file at that very path: a symbolic link may lead out of a run directory,
    and a pipe would never end. Raises OSError otherwise."""
    # O_NONBLOCK keeps the open of a pipe without a writer from blocking; fstat below then refuses it. Looking before
    # opening would leave time for a file to be exchanged for a link.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not an ordinary file")
    return descriptor


def reason(error: OSError) -> str:
    """Returns what a person reads of an error that ``open_own`` raises."""
    return "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)


class Appended:
    """Appends lines to a file. Each line is handed to the operating system at once, so that a killed process loses at
    most the one it was writing. ``is_line`` tells whether a torn last line, which an earlier process may have left, is
    whole but for its end; otherwise it is cut off. Raises OSError where the file cannot be opened or written for
    another reason than room."""

    def __init__(self, path: Path, is_line: Callable[[bytes], bool]) -> None:
        self._path, self._is_line = path, is_line
        self._descriptor: int | None = None
        self._waiting = bytearray()
        self._left_out = 0
        self._full = False
        self._try()

    def write(self, line: bytes) -> None:
        """Append a line, which ends with its end of line."""
        if len(self._waiting) + len(line) > MOST_WAITING:
            self._left_out += 1
        else:
            self._waiting += line
        self._try()

    def close(self) -> None:
        """Closes the file: nothing more will come. Warns of what never found room."""
        self._try()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        lost = self._waiting.count(b"\n") + self._left_out
        if lost:
            warnings.warn(f"the disk is full: {lost} lines are missing at the end of {self._path}", stacklevel=3)

    def _try(self) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            while self._waiting:
                # What was written is removed at once: after ENOSPC in the middle the next attempt goes on at that very
                # byte.
                del self._waiting[: os.write(self._descriptor, self._waiting[:_AT_ONCE])]  # it may take less
            self._full = False
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._full:
                self._full = True
                warnings.warn(
                    f"the disk is full: what belongs into {self._path} waits in memory; make room there", stacklevel=4
                )

    def _open(self) -> int:
        # O_APPEND places each write at the end, also after a truncation by this process.
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        torn = _tail(descriptor)
        if torn and self._is_line(torn):
            # The line is whole: only its end of line is missing, and is written before anything else.
            self._waiting[:0] = b"\n"
        elif torn:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(torn))
        return descriptor


def _tail(descriptor: int) -> bytes:
    """Returns what follows the last end of line."""
    start = size = os.fstat(descriptor).st_size
    tail = b""
    while start > 0 and b"\n" not in tail:
        # The file is read backwards: a record of weeks is large, and its last line is short.
        start = max(0, start - 65536)
        tail = os.pread(descriptor, size - start, start)
    return tail.rpartition(b"\n")[2]


def sync(path: Path) -> None:
    """Writes the contents of a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> int:
    """Writes and syncs a file of JSON; returns how many bytes it has."""
    text = json.dumps(content, indent=1).encode()
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(text)
        file.flush()
        # The data have to be on the disk before a rename makes the file visible under its name: else a power failure
        # may leave an empty file there.
        os.fsync(file.fileno())
    return len(text)


def unwritten(path: Path, error: Exception) -> CheckpointError:
    """Returns the error for a file that could not be written; it says why, and what can be done."""
    cures = {
        errno.ENOSPC: "free some of the disk, or use a run_dir= on another one",
        errno.EDQUOT: "free some of your quota, or use a run_dir= on another disk",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
        errno.EACCES: "make the folder writable, or use another run_dir=",
        errno.EROFS: "use a run_dir= on a disk that is writable",
    }
    match = re.search(r"os error (\d+)", str(error))  # safetensors has the number in its text only
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    cause = os.strerror(number) if number else str(error)
    cure = cures.get(number or 0, "check the disk, or use another run_dir=")
    return CheckpointError(f"{path} could not be written: {cause}; what was there before is intact; {cure}")


# The events of a run as lines of JSON, of which ``events.jsonl`` is made (``reporting/journal.py`` says how).


EVENTS = "events.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXTS = {"strategy", "launcher", "device", "path", "cause", "traceback", "action", "run_dir", "reason", "resume"}
"""The fields of an event's data that are text whatever they say: a cause may be "NaN"."""


def append_events(run_dir: Path, events: Iterable[Event]) -> None:
    """Appends events to the record of a run, which no rank writes any more. Raises OSError where that cannot be
    done."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = Appended(run_dir / EVENTS, lambda line: decode(line) is not None)
    try:
        for event in events:
            lines.write(encode(event))
    finally:
        lines.close()


def encode(event: Event) -> bytes:
    record = {
        "time": round(time.time(), 3),
        "kind": event.kind,
        "step": event.step,
        "epoch": event.epoch,
        "seconds": event.seconds,
        "data": event.data,
    }
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:  # some number is not finite: rare enough to find out by trying
        text = json.dumps(_finite(record), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def decode(line: bytes) -> tuple[float, Event] | None:
    """Return the wall clock and the event on a line; None where the line is not an event."""
    try:
        record = json.loads(line)
        data = record["data"]
        if not isinstance(data, dict) or not isinstance(record["kind"], str):
            return None
        if b'NaN"' in line or b'Infinity"' in line:
            data = {key: value if key in _TEXTS else _numbers(value) for key, value in data.items()}
        event = Event(
            kind=cast("EventKind", record["kind"]),
            step=operator.index(record["step"]),
            epoch=float(record["epoch"]),
            seconds=float(record["seconds"]),
            data=data,
        )
        return float(record["time"]), event
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _finite(value: Any) -> Any:
    """Return the value with a string for each number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Any:
    """Return the value with a number for each string that ``_finite`` writes for one."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
