"""Answers that clients have not read yet: together they take a bounded number of bytes, and each a bounded time."""

from __future__ import annotations

import fcntl
import struct
import termios
from dataclasses import dataclass
from typing import Protocol

from apportion.process import give_back

MOST_BYTES = 8 << 20
"""Of all answers that are not read yet. Above it whoever reads nothing is let go, the longest first; one answer may
be larger than that."""
STUCK_SECONDS = 0.1
"""Without a byte being read, before a client is let go for the sake of that limit."""
LEAST_RATE = 16 << 10
"""Bytes a second at which an answer has to be read."""


class ResponseReader(Protocol):
    """A connection whose client has an answer to read."""

    def fileno(self) -> int:
        """Of its socket; -1 where it is closed."""

    def abort(self) -> None:
        """Let it go at once."""


@dataclass(slots=True)
class _Left:
    """What a client has not read: bytes here, bytes that the system holds for it, and since when both are the same."""

    nbytes: int
    queued: int
    since: float


class Unread:
    """The bytes that each connection still has to send."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most, self.total = most, 0
        self.let_go = 0
        """Clients so far."""
        self._of: dict[ResponseReader, _Left] = {}
        self._freed = False

    def note(self, reader: ResponseReader, nbytes: int, now: float) -> None:
        """So many are left of its answer; 0: it has been read, or its connection is over."""
        before = self._of.pop(reader, None)
        self.total += nbytes - (0 if before is None else before.nbytes)
        if nbytes:
            self._of[reader] = _Left(nbytes, _queued(reader.fileno()), now)

    def make_room(self, now: float, *, coming: int = 0, newest: ResponseReader | None = None) -> None:
        """Let clients go that read nothing, until the others, and so many bytes more, are within the limit. ``newest``
        stays."""
        if self.total + coming <= self.most:
            return
        for reader, left in self._of.items():
            if (queued := _queued(reader.fileno())) != left.queued:
                left.queued, left.since = queued, now
        stuck = [(left.since, id(reader), reader) for reader, left in self._of.items() if reader is not newest]
        for since, _, reader in sorted(stuck):
            if self.total + coming <= self.most or now <= since + STUCK_SECONDS:
                break
            self.note(reader, 0, now)
            self.let_go, self._freed = self.let_go + 1, True
            reader.abort()

    def look(self, now: float) -> None:
        """Called now and then."""
        if self._freed:
            self._freed = False
            give_back()  # the C library keeps freed answers for the next ones
        self.make_room(now)


def _queued(descriptor: int) -> int:
    """Bytes that the system has for this socket and the client's has not taken."""
    if descriptor < 0:
        return 0
    found: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    return found
