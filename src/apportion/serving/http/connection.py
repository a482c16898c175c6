"""A client's connection: heads and bodies in, answers out, one request after the other (HTTP/1.1).

::

    head  ->  body, straight into the memory that members read  ->  answer  ->  the next head ...
      |                                                               ^
      +--- refused: what is left of the body is read and dropped -----+

It is implemented here, on httptools' parser, to control what happens between a body's first byte and an answer's last
one: a server that hands bodies on in pieces takes longer over half a megabyte than all else here together. Every state
has a time limit: ``enforce_time_limits`` disconnects a client that sends or reads too slowly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, MutableSet
from enum import IntEnum
from typing import Protocol, cast, final

from apportion.serving.errors import Overloaded
from apportion.serving.http.request_head import MOST_BYTES, Head, ReceiveBuffer
from apportion.serving.http.response import HTTPError, Response, ResponseWriter, Unread
from apportion.serving.pool.frames import Lease


class ConnectionState(IntEnum):
    """The part of a request that a connection is at."""

    HEAD = 0
    """A head is due, or on its way; the answer before it may still be being sent."""
    BODY = 1
    """A head has come, and its body has not, or not all of it."""
    ANSWER = 2
    """A whole request has come, and its answer is due."""
    ENDING = 3
    """The last answer is given: what the client still sends is dropped."""
    OVER = 4
    """The connection is lost."""


_S = ConnectionState
FOLLOWING: tuple[frozenset[ConnectionState], ...] = (
    frozenset({_S.BODY, _S.ENDING, _S.OVER}),
    frozenset({_S.ANSWER, _S.HEAD, _S.ENDING, _S.OVER}),
    frozenset({_S.HEAD, _S.ENDING, _S.OVER}),
    frozenset({_S.OVER}),
    frozenset(),
)
"""The states that may follow each state, by its number."""


IDLE_SECONDS = 75.0
"""The seconds that a connection may be idle between two requests."""
HEAD_SECONDS = 10.0
"""The seconds in which a head has to come."""
LINGER_SECONDS = 2.0
"""The seconds that a client has to see that it was refused, while what it still sends is not read."""
CHUNKED_BYTES = 8 << 20
"""The largest size in bytes of a body that does not say how long it is."""
HEAD, BODY, ANSWER, ENDING, OVER = ConnectionState


class Connection(asyncio.BufferedProtocol):
    """A connection to a client. ``opened``: returns the response to a head, or the request that takes its body.
    ``every``: the set that holds the connection while it is open. ``last``: whether its first request is its last.
    ``unread``: the answers of all connections that are not read yet."""

    def __init__(
        self,
        opened: Callable[[Head], Response | ConnectionRequest],
        every: MutableSet[Connection],
        *,
        body_seconds: float,
        last: bool = False,
        unread: Unread | None = None,
    ) -> None:
        self._opened, self._every, self._body_seconds = opened, every, body_seconds
        self._unread = Unread() if unread is None else unread
        self._loop = asyncio.get_running_loop()
        self._received = ReceiveBuffer()
        self._request: IncomingRequest | None = None
        self._state: ConnectionState = HEAD
        self._since = self._loop.time()
        self._advancing, self._last = False, last

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writer = ResponseWriter(self, self._transport, self._unread)
        self._every.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._every.discard(self)
        self._writer.drop(self._loop.time())
        self._state = OVER
        request, self._request = self._request, None
        if request is not None and request.asked is not None:
            request.asked.abandon()

    def eof_received(self) -> bool:
        return False  # a client that waits for an answer keeps its side open: this one has gone

    def pause_writing(self) -> None:
        self._writer.pause(self._loop.time())

    def resume_writing(self) -> None:
        self._since = self._loop.time()
        if self._writer.resume():
            if self._state is ENDING:
                self._writer.write_eof()
            elif self._last and self._state is HEAD:
                self._transport.close()
        self._writer.note_unread(self._loop.time())
        self._read_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        request = self._request
        if request is not None and request.body is not None and self._state is BODY:
            # The socket is read straight into the memory of the request, which members share where it is large: this
            # process copies no more of it than what came together with the head.
            return request.body[request.filled :]
        return memoryview(self._received.memory) if self._state is ENDING else self._received.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._state is ENDING:
            return
        request = self._request
        if request is not None and request.body is not None and self._state is BODY:
            request.filled += nbytes
            if request.filled == len(request.body):
                self._body_complete(request)
            else:
                self._check_partial(request)
            return
        self._received.end += nbytes
        self._advance()
        if self._state is ANSWER and self._received.end - self._received.begin > MOST_BYTES:
            self._transport.pause_reading()  # it sends request after request and does not wait for answers

    # A request, as far as it has come

    def _advance(self) -> None:
        # An answer may be given while the loop below runs, and it resumes reading: without this guard the parser would
        # be entered twice.
        if self._advancing:
            return
        self._advancing = True
        received, writer = self._received, self._writer
        try:
            while (
                received.begin < received.end
                and writer.stuck_since is None
                and ((self._state is HEAD and self._take_head()) or (self._state is BODY and self._take_body()))
            ):
                pass
        except HTTPError as error:
            self._refuse(error)
        finally:
            self._advancing = False
        # All was used: the next head begins at the front, and the buffer seldom has to be moved or to grow.
        if received.begin == received.end:
            received.begin = received.end = received.fed = 0

    def _take_head(self) -> bool:
        """Read what has come of a head. Returns whether it is complete."""
        received = self._received
        if received.fed <= received.begin:
            received.begin_head()
            self._since = self._loop.time()
        head = received.take_head()
        if head is None:
            return False
        self._begin_body(head)
        return True

    def _begin_body(self, head: Head) -> None:
        self._state = BODY
        request = self._request = IncomingRequest(head)
        found = self._opened(head)
        if isinstance(found, Response):
            request.refusal = found
        else:
            request.asked = found
            try:
                if head.length is not None:
                    request.body, request.held = self._room(found, head.length)
            except (HTTPError, Overloaded) as error:
                request.refusal, request.asked = found.failed(error), None
        if request.refusal is not None and (head.waits or head.length is None or head.length > DROPPED_BYTES):
            self._answer(request.refusal, last=head.length != 0)
            return
        if head.waits and head.length != 0:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.length is None:
            request.chunks = Chunks(CHUNKED_BYTES)
        elif head.length == 0:
            self._body_complete(request)

    def _room(self, asked: ConnectionRequest, length: int) -> tuple[memoryview, Lease | None]:
        """Return memory for the body, if need be that of bodies which hardly come."""
        try:
            return asked.room(length)
        except Overloaded:
            slow = [other for other in self._every if other is not self and other.slow(self._since)]
            if not slow:
                raise
            for other in slow:
                why = "the body comes too slowly while others wait for memory"
                other._refuse(HTTPError(408, why, (b"retry-after", b"1")))
        return asked.room(length)

    def slow(self, now: float) -> bool:
        """Return whether the connection holds memory for a body of which less has come than its time so far allows
        for."""
        request = self._request if self._state is BODY else None
        return request is not None and request.slow(now - self._since, self._body_seconds)

    def _take_body(self) -> bool:
        """Read what has come of a body. Returns whether any of the buffer was used."""
        request = self._request
        assert request is not None
        received = self._received
        some = memoryview(received.memory)[received.begin : received.end]
        took, whole = request.take(some)
        some.release()
        received.begin = received.fed = received.begin + took
        if whole:
            self._body_complete(request)
        else:
            self._check_partial(request)
        return whole or took > 0

    def _check_partial(self, request: IncomingRequest) -> None:
        try:
            request.check_partial()
        except Exception as error:
            self._refuse(error)

    def _body_complete(self, request: IncomingRequest) -> None:
        if request.refusal is not None:
            self._answer(request.refusal)
        else:
            self._state = ANSWER
            request.hand_over(self._answer)

    def _answer(self, reply: Response, *, last: bool = False) -> None:
        if self._state is OVER:
            return
        head = None if self._request is None else self._request.head
        last = last or self._last or head is None or not head.keep_alive
        head_only = head is not None and head.method == "HEAD"
        self._since = self._loop.time()
        self._request = None
        self._writer.send(reply, self._since, keep_alive=not last, head_only=head_only)
        if self._writer.stuck_since is not None:
            self._writer.make_room(self._since)
        if last:
            self._state = ENDING
            self._read_on()
            # A socket that is closed with bytes unread sends a reset, which may discard the answer before the client
            # has read it: the connection lingers until ``enforce_time_limits`` ends it.
            if self._writer.done:
                self._writer.write_eof()
        else:
            self._state = HEAD
            self._read_on()
        if reply.sent is not None:
            reply.sent()

    def _read_on(self) -> None:
        if self._writer.stuck_since is not None or self._transport.is_closing():
            return
        if not self._transport.is_reading():
            self._transport.resume_reading()
        if self._received.begin < self._received.end:  # not at once: the caller that gave this answer finishes first
            self._loop.call_soon(self._advance)

    def _refuse(self, error: Exception) -> None:
        """Answer with the error and read no further: where the next request would begin is not known."""
        if self._request is not None and self._request.asked is not None:
            self._answer(self._request.asked.failed(error), last=True)
        else:
            assert isinstance(error, HTTPError), "only the request that takes a body raises other errors"
            self._answer(error.reply(), last=True)

    # Called by the listener

    def enforce_time_limits(self, now: float) -> None:
        """Disconnect the client where a time limit has passed. Called every ``LOOK_SECONDS`` by the listener."""
        if self._writer.stuck_since is not None:
            self._writer.enforce_time_limits(now)
        elif self._state is ENDING and now > self._since + LINGER_SECONDS:
            self._transport.abort()
        elif self._state is HEAD and self._received.fed <= self._received.begin and now > self._since + IDLE_SECONDS:
            self._transport.close()
        elif self._state is HEAD and self._received.fed > self._received.begin and now > self._since + HEAD_SECONDS:
            self._refuse(HTTPError(408, f"the request's head did not come within {HEAD_SECONDS:g} s"))
        elif self._state is BODY and now > self._since + self._body_seconds:
            self._refuse(HTTPError(408, f"the body did not come within {self._body_seconds:g} s"))

    @property
    def busy(self) -> bool:
        """Return whether an answer is due or still being sent."""
        return self._state in (BODY, ANSWER) or self._writer.busy

    @property
    def idle_since(self) -> float | None:
        """The time since which no complete request has come; None where a body or an answer is on its way."""
        return self._since if self._state in (HEAD, ENDING) and self._writer.stuck_since is None else None

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket; -1 where there is none."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else sock.fileno()

    def drain(self) -> None:
        """End the connection after the request that it is at."""
        self._last = True
        if self._state is HEAD and self._writer.done:
            self._transport.close()

    def end(self) -> None:
        """Answer 503 where an answer is still due, since the server ends, and close the connection."""
        if self._state in (BODY, ANSWER):
            self._refuse(HTTPError(503, "the server has ended before this was answered", (b"retry-after", b"1")))
        if self._state is not OVER and not self._writer.busy:
            self._transport.close()  # what the system has of the answer is still sent
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


# A request whose head has come, and its body as it comes.
#
# A body that comes in chunks (RFC 9112, 7.1): each has its length before it, and one of length 0 is the last.


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
