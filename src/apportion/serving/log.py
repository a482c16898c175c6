"""The log of a server: one JSON object a line, on standard error: {"time", "level", "event", ...}.

A separate thread writes the lines, many at once, so that the code that logs never waits for the reader. Where the
output is not read, lines are dropped, and a line says how many.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from typing import Any, Literal

import orjson

MOST_LINES = 10_000
"""The number of lines that may wait to be written."""
TOGETHER_SECONDS = 0.01
"""The seconds in which lines gather before they are written."""
END_SECONDS = 0.5
"""The seconds in which the last lines are written when the program ends."""


class ServerLog:
    """The log of a program."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._there, self._written, self._over = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, line: bytes) -> None:
        """Add a line, which is written soon."""
        if len(self._lines) >= MOST_LINES:
            self._dropped += 1
            return
        self._lines.append(line)
        if not self._there.is_set():
            self._there.set()

    def close(self) -> None:
        """End the log, once the lines that are left have been written; waits ``END_SECONDS`` at most."""
        self._over = True
        self._there.set()
        self._thread.join(END_SECONDS)

    def _write(self) -> None:
        while not self._over or self._lines:
            self._there.wait()
            if not self._over:
                time.sleep(TOGETHER_SECONDS)
            self._there.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if dropped := self._dropped:
                self._dropped = 0
                lines.append(_line("lines dropped", "warning", {"lines": dropped}))
            try:
                _write_out(b"".join(lines))
            except Exception:  # standard error is closed, or is not read any more
                pass


def _write_out(data: bytes) -> None:
    """Writes to standard error. Where that is a file of the system it is written to past Python's buffer: a thread that
    waits in a write of that holds its lock, which Python wants when the program ends."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, AttributeError):  # a stream of memory
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
        return
    while data:
        data = data[os.write(descriptor, data) :]


_log: ServerLog | None = None


def log(event: str, *, level: Literal["info", "warning", "error"] = "info", **about: Any) -> None:
    """Log an event. ``event``: a text for people and for grep; the rest is for programs."""
    global _log
    if _log is None:
        _log = ServerLog()
    _log.add(_line(event, level, about))


def _line(event: str, level: str, about: dict[str, Any]) -> bytes:
    return orjson.dumps({"time": round(time.time(), 3), "level": level, "event": event, **about}, default=str) + b"\n"
