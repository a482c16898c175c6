"""The messages between the driver and an agent: JSON or plain bytes, each behind its kind and its length.

::

    J  length  {"kind": "event", ...}
    B  length  the bytes

Nothing is unpickled, and nothing is allocated for a length beyond the bound of its kind. An agent begins with a line of
its own, since what a login shell prints comes first.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, final

MOST_JSON, MOST_BYTES = 16 << 20, 80 << 20
"""The most bytes of a message of each kind."""
GREETING = b"\napportion-agent/1\n"
"""The line that an agent begins with."""
MOST_NOISE = 1 << 16
"""The most bytes that a login shell may print before it."""
ALIVE_SECONDS = 0.5
"""The seconds after which each end says that it is there."""
_HEAD = struct.Struct("!cI")
_BOUNDS = {b"J": MOST_JSON, b"B": MOST_BYTES}
Message = dict[str, Any]


class FrameError(Exception):
    """What came is not a message of this protocol."""


@final
class FrameWriter:
    """Writes messages, whole ones from any thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def greet(self) -> None:
        """Writes the line that an agent begins with."""
        with self._lock:
            self._file.write(GREETING)
            self._file.flush()

    def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Writes a message. Raises OSError where the other end is gone, ValueError where it is too long."""
        kind, data = (b"B", message) if isinstance(message, bytes) else (b"J", json.dumps(message).encode())
        if len(data) > _BOUNDS[kind]:
            raise ValueError(f"a message of {len(data):,} bytes is longer than {_BOUNDS[kind]:,}")
        with self._lock:
            self._file.write(_HEAD.pack(kind, len(data)) + data)
            self._file.flush()


@final
class FrameReader:
    """Reads messages, from one thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def await_greeting(self) -> bool:
        """Skips what a login shell prints, and returns whether the line of an agent has come before the end, or before
        too much else has."""
        seen = b""
        while not seen.endswith(GREETING):
            byte = self._file.read(1)
            if not byte or len(seen) > MOST_NOISE:
                return False
            seen += byte
        return True

    def receive(self) -> Message | bytes | None:
        """Returns the next message; None at the end of the stream, within a message too. Raises FrameError where what
        comes is none."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack(head)
        if length > _BOUNDS.get(kind, -1):
            raise FrameError(f"{head!r} does not begin a message")
        data = self._file.read(length)
        if len(data) < length:
            return None
        if kind == b"B":
            return data
        try:
            message = json.loads(data)
        except RecursionError:
            raise FrameError(f"{data[:40]!r} is JSON that is nested too deep to be read") from None
        except ValueError as error:
            raise FrameError(f"{data[:40]!r} is not JSON ({error})") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise FrameError(f"{data[:40]!r} says no kind")
        return message
