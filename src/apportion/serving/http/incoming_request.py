"""A request whose head has come, and its body as it comes.

A body that comes in chunks (RFC 9112, 7.1): each has its length before it, and one of length 0 is the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, final

from apportion.serving.http.request_head import Head
from apportion.serving.http.response import HTTPError, Response
from apportion.serving.pool.shared_arena import Lease

MOST_LINE = 4096
"""The largest number of bytes of a line: a length with what may follow it, or a trailer."""
MOST_TRAILERS = 64 << 10
"""The largest number of bytes of all trailers, which are not read."""
# At most 15 hexadecimal digits, which stay below 2**63; extensions after ";" are skipped (RFC 9112, 7.1.1).
_LENGTH = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


class Chunks:
    """A chunked body as it comes. ``body``: what has come so far, ``most`` bytes at most."""

    def __init__(self, most: int) -> None:
        self.body, self._most = bytearray(), most
        self._trailers = 0
        self._left, self._within, self._last, self._whole = 0, False, False, False

    def feed(self, data: memoryview) -> tuple[int, bool]:
        """Take what has come. Returns (the number of bytes that were taken, whether the body is complete); the rest is
        to be fed again with what follows. Raises HTTPError where the body is malformed or too large."""
        at = 0
        while at < len(data) and not self._whole:
            took = self._data(data[at:]) if self._within else self._line(data[at:])
            if took is None:
                break
            at += took
        return at, self._whole

    def _data(self, data: memoryview) -> int | None:
        if self._left:
            took = data[: self._left]
            self.body += took
            self._left -= len(took)
            return len(took)
        # The line end after a chunk may be split between two receives: it is only consumed as a whole.
        if len(data) < 2:
            return None
        if bytes(data[:2]) != b"\r\n":
            raise HTTPError(400, "a chunk is longer than it says")
        self._within = False
        return 2

    def _line(self, data: memoryview) -> int | None:
        line = bytes(data[: MOST_LINE + 2])
        end = line.find(b"\r\n")
        if end < 0:
            if len(line) > MOST_LINE:
                raise HTTPError(400, f"a line between chunks has more than {MOST_LINE} bytes")
            return None
        # A bare CR or LF is read as a line end by some servers: accepting it would let two of them disagree about where
        # a body ends.
        if any(mark in line[:end] for mark in (b"\n", b"\r", b"\0")):
            raise HTTPError(
                400, "a line between chunks or after them has a line feed, a carriage return or a zero in it"
            )
        if self._last:
            self._whole, self._trailers = end == 0, self._trailers + end + 2
            if self._trailers > MOST_TRAILERS:
                raise HTTPError(431, f"the body's trailers have more than {MOST_TRAILERS} bytes")
            return end + 2
        found = _LENGTH.fullmatch(line[:end])
        if found is None:
            raise HTTPError(400, f"{line[: min(end, 40)]!r} must be the length of a chunk")
        self._left = int(found[1], 16)
        # Checked by the announced length, before any byte of the chunk is stored.
        if len(self.body) + self._left > self._most:
            raise HTTPError(413, f"the body has more than {self._most} bytes: say its content-length")
        self._last, self._within = self._left == 0, self._left > 0
        return end + 2


SLOW_SECONDS = 0.25
"""The seconds that every body has to come, also where others wait for memory."""
DROPPED_BYTES = 1 << 20
"""The number of bytes of an unwanted body that are read to keep the connection; with a longer one it ends."""


class ConnectionRequest(Protocol):
    """A request for inference whose head has come."""

    def room(self, length: int) -> tuple[memoryview, Lease | None]:
        """Return memory for the body. Raises HTTPError, or Overloaded where there is none."""

    def check_partial(self, so_far: memoryview) -> bool:
        """Look at a long body of which so much has come. Returns whether no more of it need be looked at before it is
        whole; raises the error with which it is refused."""

    def body_received(self, body: memoryview, held: Lease | None, respond: Callable[[Response], None]) -> None:
        """Take the complete body. ``respond`` is called once with the response, perhaps at once."""

    def failed(self, error: Exception) -> Response:
        """Return the response where the body did not come."""

    def abandon(self) -> None:
        """Give the request up, because the client has gone."""


@final
class IncomingRequest:
    """A request from its head to its answer."""

    asked: ConnectionRequest | None = None
    """The taker of the body; None where there is none, or where the request is refused."""
    refusal: Response | None = None
    """The answer, where nothing is to be made of the body."""
    body: memoryview | None = None
    """The memory for a body that says how long it is."""
    held: Lease | None = None
    """The lease of that memory."""
    chunks: Chunks | None = None
    """The body, where it does not say how long it is."""
    filled: int = 0
    """The number of bytes of the body that have come."""
    _judged = False

    def __init__(self, head: Head) -> None:
        self.head = head

    def take(self, some: memoryview) -> tuple[int, bool]:
        """Take what has come of the body. Returns (the number of bytes that were taken, whether it is complete)."""
        if self.chunks is not None:
            return self.chunks.feed(some)
        length = self.head.length
        assert length is not None
        took = min(len(some), length - self.filled)
        if self.body is not None:
            self.body[self.filled : self.filled + took] = some[:took]
        self.filled += took
        return took, self.filled == length

    def check_partial(self) -> None:
        """Look at a long body as it comes. Raises what it is refused with, as soon as what has come says that it is
        wrong."""
        if self._judged or self.asked is None or self.body is None or len(self.body) <= DROPPED_BYTES:
            return
        self._judged = self.asked.check_partial(self.body[: self.filled])

    def slow(self, seconds: float, allowed: float) -> bool:
        """Return whether the request holds memory for a body of which less has come in ``seconds`` than is due if all
        of it has to come within ``allowed`` seconds."""
        if self.held is None or self.body is None:
            return False
        return seconds > SLOW_SECONDS and self.filled * allowed < len(self.body) * seconds

    def hand_over(self, respond: Callable[[Response], None]) -> None:
        """Hand the complete body over. ``respond`` is called once with the response, perhaps at once."""
        assert self.asked is not None
        body = memoryview(self.chunks.body) if self.chunks is not None else self.body
        assert body is not None
        self.asked.body_received(body, self.held, respond)
