"""The answers that clients have not read yet: together they take a bounded number of bytes, and each a bounded time."""

from __future__ import annotations

import fcntl
import struct
import termios
from dataclasses import dataclass
from typing import Protocol

from apportion.process import give_back

MOST_BYTES = 8 << 20
"""The largest number of bytes of all answers that are not read yet. Above it clients that read nothing are
disconnected, those that have read nothing for longest first; one answer may be larger than that."""
STUCK_SECONDS = 0.1
"""The seconds in which a client has to have read nothing before it is disconnected for the sake of that limit."""
LEAST_RATE = 16 << 10
"""The bytes a second at which an answer has to be read."""


class ResponseReader(Protocol):
    """A connection whose client has an answer to read."""

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket; -1 where it is closed."""

    def abort(self) -> None:
        """Close the connection at once."""


@dataclass(slots=True)
class _Left:
    """The part of an answer that a client has not read: bytes here, bytes that the system holds for it, and the time
    since which the latter have not changed."""

    nbytes: int
    queued: int
    since: float


class Unread:
    """The bytes that each connection still has to send."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most, self.total = most, 0
        self.let_go = 0
        """The number of clients that were disconnected so far."""
        self._of: dict[ResponseReader, _Left] = {}
        self._freed = False

    def note(self, reader: ResponseReader, nbytes: int, now: float) -> None:
        """Record that ``nbytes`` are left of a client's answer; 0 where it has been read, or the connection is
        over."""
        before = self._of.pop(reader, None)
        self.total += nbytes - (0 if before is None else before.nbytes)
        if nbytes:
            self._of[reader] = _Left(nbytes, _queued(reader.fileno()), now)

    def make_room(self, now: float, *, coming: int = 0, newest: ResponseReader | None = None) -> None:
        """Disconnect clients that read nothing, until the others and ``coming`` more bytes are within the limit.
        ``newest`` stays."""
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

    def enforce_limits(self, now: float) -> None:
        """Give freed memory back to the system and make room. Called now and then by the listener."""
        if self._freed:
            self._freed = False
            give_back()  # the C library keeps freed answers for the next ones
        self.make_room(now)


def _queued(descriptor: int) -> int:
    """Return the number of bytes that the system holds for this socket and the client's system has not taken."""
    if descriptor < 0:
        return 0
    found: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    return found
