"""The response to a request, and its bytes.

The answers that clients have not read yet: together they take a bounded number of bytes, and each a bounded time.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, final

import orjson

from apportion.process import give_back

JSON = b"application/json"
_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class HTTPError(Exception):
    """An error as an answer: its status, its sentence, and headers."""

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers

    def reply(self) -> Response:
        """Return the response that is sent for the error."""
        return Response(self.status, orjson.dumps({"error": str(self)}), JSON, self.headers)


@dataclass(slots=True)
class Response:
    """A response. ``sent``: called once the response is sent, to count it; no client waits for that."""

    status: int
    body: bytes
    kind: bytes = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()
    sent: Callable[[], None] | None = None

    def encoded(self, *, keep_alive: bool, head_only: bool = False) -> bytes:
        """Return the whole response as bytes; ``head_only`` leaves out the body."""
        rest = b"".join([b"%s: %s\r\n" % header for header in self.headers])
        return b"%scontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n%s" % (
            _LINES[self.status],
            self.kind,
            len(self.body),
            rest,
            b"" if keep_alive else b"connection: close\r\n",
            b"" if head_only else self.body,
        )


MOST_UNREAD_BYTES = 8 << 20
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

    def __init__(self, most: int = MOST_UNREAD_BYTES) -> None:
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
        # The connection's id breaks ties, since connections cannot be compared. ``newest`` stays: its client had no
        # time to read yet.
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
    # TIOCOUTQ is what the peer has not acknowledged: it shrinks as soon as the client's system takes bytes, while
    # asyncio's buffer only changes in steps of what the local kernel takes.
    found: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    return found


SENT_SECONDS = 30.0
"""The seconds in which a client has to read at least some of an answer."""
PIECE_BYTES = 1 << 20
"""The number of bytes of an answer that the transport is given at once, since it copies what it cannot send."""


@final
class ResponseWriter:
    """The sending side of a connection."""

    def __init__(self, reader: ResponseReader, transport: asyncio.Transport, unread: Unread) -> None:
        self._reader, self._transport, self._unread = reader, transport, unread
        self._left: memoryview | None = None
        self.stuck_since: float | None = None
        """The time since which the client has not taken what it was sent; None where it has."""
        self._unsent = 0
        self._read_by = float("inf")
        transport.set_write_buffer_limits(high=0)  # ``pause``: whenever something is left to be sent

    @property
    def done(self) -> bool:
        """True where the transport has been given all of the answer."""
        return self._left is None

    @property
    def busy(self) -> bool:
        """True while an answer is being sent."""
        return self._left is not None or self._transport.get_write_buffer_size() > 0

    def pause(self, now: float) -> None:
        """Send no more until the client has taken what it was sent; who does not read answers is not asked what else it
        wants."""
        self.stuck_since = now
        self._transport.pause_reading()

    def resume(self) -> bool:
        """Go on sending. Returns whether the transport has just been given the last of an answer."""
        self.stuck_since = None
        return self._send_on()

    def send(self, reply: Response, now: float, *, keep_alive: bool, head_only: bool) -> None:
        """Send an answer, as far as the client reads it; the rest follows."""
        self._read_by = float("inf")
        if head_only or len(reply.body) <= PIECE_BYTES:
            self._transport.write(reply.encoded(keep_alive=keep_alive, head_only=head_only))
        else:
            self._read_by = now + SENT_SECONDS + len(reply.body) / LEAST_RATE
            self._transport.write(reply.encoded(keep_alive=keep_alive, head_only=True))
            self._left = memoryview(reply.body)
            self._send_on()

    def _send_on(self) -> bool:
        sent = False
        while self._left is not None and self.stuck_since is None and not self._transport.is_closing():
            piece, rest = self._left[:PIECE_BYTES], self._left[PIECE_BYTES:]
            self._left = rest if len(rest) else None
            self._transport.write(piece)
            sent = self._left is None
        return sent

    def note_unread(self, now: float) -> None:
        """Record how much the client has not read."""
        left = 0 if self._left is None else len(self._left)
        self._unread.note(self._reader, left + self._transport.get_write_buffer_size(), now)

    def make_room(self, now: float) -> None:
        """Record how much the client has not read, and have others disconnected where that is too much in all."""
        self.note_unread(now)
        self._unread.make_room(now, newest=self._reader)

    def enforce_time_limits(self, now: float) -> None:
        """Disconnect a client that is stuck where a time limit has passed."""
        assert self.stuck_since is not None
        if now > self._read_by:
            self._transport.abort()
        elif (left := self._transport.get_write_buffer_size()) != self._unsent:
            self._unsent, self.stuck_since = left, now  # it reads, if slowly
        elif now > self.stuck_since + SENT_SECONDS:
            self._transport.abort()

    def write_eof(self) -> None:
        """Tell the client that nothing more comes."""
        try:
            self._transport.write_eof()
        except OSError:  # it has gone
            self._transport.abort()

    def drop(self, now: float) -> None:
        """Forget what is left of an answer, since the connection is lost."""
        self._unread.note(self._reader, 0, now)
        self._left = None
