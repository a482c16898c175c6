"""A client's connection: heads and bodies in, answers out, one request after the other (HTTP/1.1).

::

    head  ->  body, straight into the memory that members read  ->  answer  ->  the next head ...
      |                                                               ^
      +--- refused: what is left of the body is read and dropped -----+

It is implemented here, on httptools' parser, to control what happens between a body's first byte and an answer's last
one: a server that hands bodies on in pieces takes longer over half a megabyte than all else here together. Every state
has a time limit: ``look`` disconnects a client that sends or reads too slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableSet
from typing import Literal, Protocol, cast

from apportion.serving.errors import Overloaded
from apportion.serving.http.chunked_body import Chunks
from apportion.serving.http.request_head import END, MOST_BYTES, Head, HeadReader
from apportion.serving.http.response import HTTPError, Response
from apportion.serving.http.unread_responses import LEAST_RATE, Unread
from apportion.serving.pool.shared_arena import Lease

IDLE_SECONDS = 75.0
"""The seconds that a connection may be idle between two requests."""
HEAD_SECONDS = 10.0
"""The seconds in which a head has to come."""
SENT_SECONDS = 30.0
"""The seconds in which a client has to read at least some of an answer."""
LINGER_SECONDS = 2.0
"""The seconds that a client has to see that it was refused, while what it still sends is not read."""
SLOW_SECONDS = 0.25
"""The seconds that every body has to come, also where there is no memory for others."""
DROPPED_BYTES = 1 << 20
"""The number of bytes of an unwanted body that are read to keep the connection; with a longer one it ends."""
CHUNKED_BYTES = 8 << 20
"""The largest size in bytes of a body that does not say how long it is."""
PIECE_BYTES = 1 << 20
"""The number of bytes of an answer that the transport is given at once, since it copies what it cannot send."""
_FIRST_ROOM = 64 << 10
"""The number of bytes that are received at once: a small request comes whole."""


class ConnectionRequest(Protocol):
    """A request for inference whose head has come."""

    def room(self, length: int) -> tuple[memoryview, Lease | None]:
        """Return memory for the body. Raises HTTPError, or Overloaded where there is none."""

    def judged(self, so_far: memoryview) -> bool:
        """Look at a long body of which so much has come. Returns whether no more of it need be looked at before it is
        whole; raises the error with which it is refused."""

    def came(self, body: memoryview, held: Lease | None, told: Callable[[Response], None]) -> None:
        """Take the complete body. ``told`` is called once with the response, perhaps at once."""

    def failed(self, error: Exception) -> Response:
        """Return the response where the body did not come."""

    def leave(self) -> None:
        """Give the request up, because the client has gone."""


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
        self._buffer, self._begin, self._end, self._fed = bytearray(_FIRST_ROOM), 0, 0, 0
        self._state: Literal["head", "body", "answer", "ending", "over"] = "head"
        self._since = self._loop.time()
        self._stuck_since: float | None = None
        self._unsent = 0
        self._answer_left: memoryview | None = None
        self._read_by = float("inf")
        self._reader = HeadReader()
        self._advancing, self._last = False, last
        self._forget()

    def _forget(self) -> None:
        """Forget the last request, before the next one."""
        self._head: Head | None = None
        self._asked: ConnectionRequest | None = None
        self._refusal: Response | None = None
        self._body: memoryview | None = None
        self._held: Lease | None = None
        self._chunks: Chunks | None = None
        self._filled = self._dropped = 0
        self._judged = False

    # Of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # ``pause_writing``: whenever something is left to be sent
        self._every.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._every.discard(self)
        self._unread.note(self, 0, self._loop.time())
        self._state, self._answer_left = "over", None
        if self._asked is not None:
            self._asked.leave()
        self._forget()

    def eof_received(self) -> bool:
        return False  # nobody who waits for an answer says that it sends no more: the client has gone

    def pause_writing(self) -> None:
        self._stuck_since = self._loop.time()
        self._transport.pause_reading()  # who does not read answers is not asked what else it wants

    def resume_writing(self) -> None:
        self._stuck_since, self._since = None, self._loop.time()
        self._send_on()
        self._note_unread()
        self._read_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None and self._state == "body":
            return self._body[self._filled :]
        if self._state == "ending":
            return memoryview(self._buffer)
        if self._begin and self._end == len(self._buffer):
            left = self._end - self._begin
            self._buffer[:left] = self._buffer[self._begin : self._end]
            self._begin, self._end, self._fed = 0, left, self._fed - self._begin
        if self._end == len(self._buffer):
            self._buffer = self._buffer + bytearray(len(self._buffer))
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._state == "ending":
            return
        if self._body is not None and self._state == "body":
            self._filled += nbytes
            if self._filled == len(self._body):
                self._whole()
            else:
                self._judge()
            return
        self._end += nbytes
        self._advance()
        if self._state == "answer" and self._end - self._begin > MOST_BYTES:
            self._transport.pause_reading()  # it sends request after request and does not wait for answers

    # A request, as far as it has come

    def _advance(self) -> None:
        if self._advancing:
            return
        self._advancing = True
        try:
            while (
                self._begin < self._end
                and self._stuck_since is None
                and ((self._state == "head" and self._take_head()) or (self._state == "body" and self._take_body()))
            ):
                pass
        except HTTPError as error:
            self._refuse(error)
        finally:
            self._advancing = False
        if self._begin == self._end:
            self._begin = self._end = self._fed = 0

    def _take_head(self) -> bool:
        """Read what has come of a head. Returns whether it is complete."""
        if self._fed <= self._begin:
            while self._begin + 2 <= self._end and self._buffer[self._begin : self._begin + 2] == END[:2]:
                self._begin += 2  # an empty line before a request is no part of it
            self._since, self._fed = self._loop.time(), self._begin
        at = self._buffer.find(END, max(self._begin, self._fed - len(END) + 1), self._end)
        end = self._end if at < 0 else at + len(END)
        if end - self._begin > MOST_BYTES:
            raise HTTPError(431, f"the request's head has more than {MOST_BYTES} bytes")
        self._reader.feed(bytes(self._buffer[self._fed : end]))
        self._fed = end
        if at < 0:
            return False
        head, self._reader = self._reader.head(), HeadReader()
        self._begin, self._head = end, head
        self._begin_body(head)
        return True

    def _begin_body(self, head: Head) -> None:
        self._state = "body"
        found = self._opened(head)
        if isinstance(found, Response):
            self._refusal = found
        else:
            self._asked = found
            try:
                if head.length is not None:
                    self._body, self._held = self._room(found, head.length)
            except (HTTPError, Overloaded) as error:
                self._refusal, self._asked = found.failed(error), None
        if self._refusal is not None and (head.waits or head.length is None or head.length > DROPPED_BYTES):
            self._answer(self._refusal, last=head.length != 0)
            return
        if head.waits and head.length != 0:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.length is None:
            self._chunks = Chunks(CHUNKED_BYTES)
        elif head.length == 0:
            self._whole()

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
        if self._held is None or self._body is None or self._state != "body":
            return False
        took = now - self._since
        return took > SLOW_SECONDS and self._filled * self._body_seconds < len(self._body) * took

    def _take_body(self) -> bool:
        """Read what has come of a body. Returns whether any of the buffer was used."""
        assert self._head is not None
        some = memoryview(self._buffer)[self._begin : self._end]
        if self._chunks is not None:
            took, whole = self._chunks.feed(some)
        elif self._body is not None:
            took = min(len(some), len(self._body) - self._filled)
            self._body[self._filled : self._filled + took] = some[:took]
            self._filled += took
            whole = self._filled == len(self._body)
        else:
            assert self._head.length is not None
            took = min(len(some), self._head.length - self._dropped)
            self._dropped += took
            whole = self._dropped == self._head.length
        some.release()
        self._begin += took
        self._fed = self._begin
        if whole:
            self._whole()
        else:
            self._judge()
        return whole or took > 0

    def _judge(self) -> None:
        """Refuse a long body as soon as what has come of it says that it is wrong."""
        if self._judged or self._asked is None or self._body is None or len(self._body) <= DROPPED_BYTES:
            return
        try:
            self._judged = self._asked.judged(self._body[: self._filled])
        except Exception as error:
            self._refuse(error)

    def _whole(self) -> None:
        if self._refusal is not None:
            self._answer(self._refusal)
            return
        assert self._asked is not None
        self._state = "answer"
        body = memoryview(self._chunks.body) if self._chunks is not None else self._body
        assert body is not None
        self._asked.came(body, self._held, self._answer)

    def _answer(self, reply: Response, *, last: bool = False) -> None:
        if self._state == "over":
            return
        head, self._asked = self._head, None
        last = last or self._last or head is None or not head.keep_alive
        head_only = head is not None and head.method == "HEAD"
        self._since = self._loop.time()
        self._read_by = float("inf")
        if head_only or len(reply.body) <= PIECE_BYTES:
            self._transport.write(reply.encoded(keep_alive=not last, head_only=head_only))
        else:
            self._read_by = self._since + SENT_SECONDS + len(reply.body) / LEAST_RATE
            self._transport.write(reply.encoded(keep_alive=not last, head_only=True))
            self._answer_left = memoryview(reply.body)
            self._send_on()
        self._forget()
        if self._stuck_since is not None:
            self._note_unread()
            self._unread.make_room(self._since, newest=self)
        if last:
            self._end_it()
        else:
            self._state = "head"
            self._read_on()
        if reply.sent is not None:
            reply.sent()

    def _send_on(self) -> None:
        """Send what is left of an answer, as far as the client reads it."""
        while self._answer_left is not None and self._stuck_since is None and not self._transport.is_closing():
            piece, rest = self._answer_left[:PIECE_BYTES], self._answer_left[PIECE_BYTES:]
            self._answer_left = rest if len(rest) else None
            self._transport.write(piece)
            if self._answer_left is None and self._state == "ending":
                self._write_eof()
            elif self._answer_left is None and self._last and self._state == "head":
                self._transport.close()

    def _note_unread(self) -> None:
        left = 0 if self._answer_left is None else len(self._answer_left)
        self._unread.note(self, left + self._transport.get_write_buffer_size(), self._loop.time())

    def _read_on(self) -> None:
        if self._stuck_since is not None or self._transport.is_closing():
            return
        if not self._transport.is_reading():
            self._transport.resume_reading()
        if self._begin < self._end:  # not at once: whoever has given this answer is to finish first
            self._loop.call_soon(self._advance)

    def _refuse(self, error: Exception) -> None:
        """Answer with the error and read no further: where the next request would begin is not known."""
        if self._asked is not None:
            self._answer(self._asked.failed(error), last=True)
        else:
            assert isinstance(error, HTTPError), "only who takes a body knows what else may be wrong"
            self._answer(error.reply(), last=True)

    def _end_it(self) -> None:
        """End the connection once the client has the answer: a socket that is closed with bytes unread takes back what
        was sent."""
        self._state = "ending"
        self._read_on()
        if self._answer_left is None:
            self._write_eof()

    def _write_eof(self) -> None:
        try:
            self._transport.write_eof()
        except OSError:  # it has gone
            self._transport.abort()

    # From outside

    def look(self, now: float) -> None:
        """Disconnect the client where a time limit has passed. Called every ``LOOK_SECONDS`` by the listener."""
        if self._stuck_since is not None:
            if now > self._read_by:
                self._transport.abort()
            elif (left := self._transport.get_write_buffer_size()) != self._unsent:
                self._unsent, self._stuck_since = left, now  # it reads, if slowly
            elif now > self._stuck_since + SENT_SECONDS:
                self._transport.abort()
        elif self._state == "ending" and now > self._since + LINGER_SECONDS:
            self._transport.abort()
        elif self._state == "head" and self._fed <= self._begin and now > self._since + IDLE_SECONDS:
            self._transport.close()
        elif self._state == "head" and self._fed > self._begin and now > self._since + HEAD_SECONDS:
            self._refuse(HTTPError(408, f"the request's head did not come within {HEAD_SECONDS:g} s"))
        elif self._state == "body" and now > self._since + self._body_seconds:
            self._refuse(HTTPError(408, f"the body did not come within {self._body_seconds:g} s"))

    @property
    def busy(self) -> bool:
        """Return whether an answer is due or still being sent."""
        return (
            self._state in ("body", "answer")
            or self._answer_left is not None
            or self._transport.get_write_buffer_size() > 0
        )

    @property
    def idle_since(self) -> float | None:
        """The time since which no complete request has come; None where a body or an answer is on its way."""
        return self._since if self._state in ("head", "ending") and self._stuck_since is None else None

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket; -1 where there is none."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else sock.fileno()

    def drain(self) -> None:
        """End the connection after the request that it is at."""
        self._last = True
        if self._state == "head" and self._answer_left is None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
