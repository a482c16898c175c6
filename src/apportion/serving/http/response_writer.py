"""The answers on their way to a client, as fast as it reads them."""

from __future__ import annotations

import asyncio
from typing import final

from apportion.serving.http.response import Response
from apportion.serving.http.unread_responses import LEAST_RATE, ResponseReader, Unread

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
