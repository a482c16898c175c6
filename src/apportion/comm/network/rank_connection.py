"""A connection to another rank: messages of known lengths, sent and received as far as it goes without waiting.

A message is its number, its length and its bytes. Who receives says beforehand how long the next one is, so nothing is
stored on the word of the other end, and ranks that do not agree on the order of their messages are found out.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

from torch import Tensor

from apportion.comm.group import WaitClock, bytes_of
from apportion.comm.network.address import prepare_bulk, round_trip
from apportion.errors import PeerLost

_HEADER = struct.Struct("!QQ")
"""The number of a message on its connection, and its length in bytes."""
BUFFER_BYTES = 4 << 20
"""The bytes that the system is asked to hold of what is sent. What it holds of what comes it settles by itself: where
that is asked for, what it offers the other end may stay at its first 64 KiB or so, too little for a fast cable."""
WAKE_BYTES = 32 << 10
"""The bytes of a message that are waited for at once: to be woken for each packet costs more than to copy it. Half of
what the system offers a new connection to send: where that is less than what is waited for, the other end stops."""
AHEAD_BYTES, AHEAD_SECONDS = 128 << 10, 0.005
"""What one end of an exchange may send before as much has come from the other end, at least: bytes, and what goes in so
many seconds beside what is on the way there and back. Without a limit the end with the larger congestion window fills
the queue in which its acknowledgements of what comes wait too: both directions then share the cable as their windows
are to each other, and the exchange lasts as long as the slower one (Zhang, Shenker and Clark, "Observations on the
dynamics of a congestion control algorithm: the effects of two-way traffic", SIGCOMM 1991)."""
NAP_SECONDS = 0.0005
"""The seconds between two looks at other messages that only this process moves on."""
LOOK_SECONDS = 1.0
"""The seconds between two looks at the deadline."""


class PeerSocket:
    """The socket to another end that has proved itself. Any thread may close it."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        """The name of the other end, for messages of errors."""
        self._sock, self._closed = sock, False
        if sock.family != socket.AF_UNIX:
            prepare_bulk(sock)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def _lost(self, why: str) -> PeerLost:
        return PeerLost(f"the connection to {self.name} was lost: {'it was closed here' if self._closed else why}")

    def close(self) -> None:
        """Ends the connection: a thread that waits for its messages stops waiting."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Gives the descriptor back, once no thread waits any more."""
        self.close()
        self._sock.close()


class _Exchange(NamedTuple):
    """A message to send whose counterpart comes at the same time."""

    number: int
    counterpart: int
    """The number of the message to receive."""
    nbytes: int
    counterpart_nbytes: int


_NOT_EXCHANGED = _Exchange(0, 0, 0, 0)
"""The number of no message."""


@final
class RankConnection(PeerSocket):
    """One end of a connection. One thread at a time moves its messages; any thread may close it."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        super().__init__(sock, name)
        sock.setblocking(False)
        self._sends: deque[memoryview] = deque()
        self._receives: deque[memoryview] = deque()
        self._exchanges: deque[_Exchange] = deque()
        """The exchanges under way, of which this end's message is not through."""
        self._ahead = AHEAD_BYTES
        """The bytes by which this end of an exchange may go ahead of the other."""
        self._came_at = 0.0
        """When the first message to receive began to come."""
        self._head = b""
        """What is left of the header of the first message to send."""
        self._begun = False
        self._got = bytearray()
        """What has arrived of the header of the message to receive."""
        self.sent = self.received = 0
        """The bytes of the messages under way that have gone out and come in, since ``begin_count``."""
        self.started, self.through = [0, 0], [0, 0]
        """The numbers of messages that were begun and that are through: those to send, and those to receive."""
        self._wake_at = 1
        """The bytes from which on the system says that there is something to receive."""
        self.gone = 0
        """The bytes of all messages that have gone out."""

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """The events of the socket that would move a message on."""
        return (select.POLLOUT if self._sends and self._room() else 0) | (select.POLLIN if self._receives else 0)

    def begin_count(self) -> None:
        """Counts the bytes that go out and come in from zero."""
        self.sent = self.received = 0

    def send(self, data: memoryview) -> int:
        """Begins a message; the memory must stay as it is until the message is through. Returns its number."""
        self._sends.append(data)
        self.started[0] += 1
        return self.started[0]

    def receive(self, into: memoryview) -> int:
        """Begins to receive the next message, which must have this length. Returns its number."""
        self._receives.append(into)
        self.started[1] += 1
        return self.started[1]

    def exchange(self, data: memoryview, into: memoryview) -> tuple[int, int]:
        """Begins a message and the receipt of another, of which the other end does the same: neither end goes far ahead
        of the other. Returns the numbers of both."""
        sent, got = self.send(data), self.receive(into)
        if data.nbytes > AHEAD_BYTES:
            self._exchanges.append(_Exchange(sent, got, data.nbytes, into.nbytes))
        return sent, got

    def _room(self) -> int:
        """Returns how many bytes of the first message to send may go now."""
        left = self._sends[0].nbytes
        number, counterpart, whole, due = self._exchanges[0] if self._exchanges else _NOT_EXCHANGED
        awaited = counterpart - self.through[1]
        # Only the message at the head of the queue is held back, and only until its counterpart has come whole.
        if number != self.through[0] + 1 or awaited <= 0:  # it is not an exchange's, or its counterpart has come
            return max(left, 1)
        came = due - self._receives[0].nbytes if awaited == 1 else 0
        ahead, worth = whole - left - came, min(left, WAKE_BYTES)
        if self._ahead - ahead < worth and came >= self._ahead:
            self._ahead = self._carried_ahead(came)
        room = self._ahead - ahead
        return room if room >= worth else 0

    def _carried_ahead(self, came: int) -> int:
        """Returns by how many bytes this end may go ahead, by the rate at which this many have come. The time that they
        took is counted as a little more than it was: what lay here already has come at once."""
        trip = round_trip(self._sock)
        took = time.perf_counter() - self._came_at + max(trip, AHEAD_SECONDS)
        return max(AHEAD_BYTES, int(came / took * (2 * trip + AHEAD_SECONDS)))

    def move(self) -> bool:
        """Moves on what can be moved without waiting, and returns whether anything is left. Raises PeerLost where the
        connection has ended, and AssertionError where a message has another length than was expected."""
        try:
            while self._receives and self._pull():  # first: how much may go turns on what has come
                pass
            while self._sends and (room := self._room()) and self._push(room):
                pass
        except OSError as error:
            raise self._lost(error.strerror or type(error).__name__) from error
        return bool(self._sends or self._receives)

    def move_aside(self) -> bool:
        """Moves on what can be moved while something else is waited for, and returns whether that may be gone on with.
        That the connection has ended is said to the thread that waits for its messages: where the other end has sent
        its last one and has left, the one that was asked for ahead never comes, and is not missed."""
        try:
            return self.move()
        except PeerLost:
            return False

    def _push(self, room: int) -> bool:
        data = self._sends[0]
        if not self._begun:
            self._head, self._begun = _HEADER.pack(self.through[0], data.nbytes), True
        try:
            # Header and bytes in one call: a header by itself would leave as a packet of its own (TCP_NODELAY).
            gone = self._sock.sendmsg([self._head, data[:room]])
        except BlockingIOError:
            return False
        head = min(gone, len(self._head))
        self._head = self._head[head:]
        self._sends[0] = data = data[gone - head :]
        self.sent += gone - head
        self.gone += gone - head
        if not self._head and not data.nbytes:
            self._sends.popleft()
            self._begun = False
            self.through[0] += 1
            if self._exchanges and self._exchanges[0].number == self.through[0]:
                self._exchanges.popleft()
            return True
        return False  # the system took what it has room for

    def _pull(self) -> bool:
        into = self._receives[0]
        left = _HEADER.size - len(self._got)
        head = bytearray(left)
        try:
            # Never more than this message: what follows belongs to the next one, whose memory is not known yet.
            came = self._sock.recvmsg_into([head, into] if left else [into])[0]
        except BlockingIOError:
            self._wake_from(min(left + into.nbytes, WAKE_BYTES))
            return False
        if not came and (left or into.nbytes):
            raise self._lost("it ended")
        if left:
            self._got += head[:came]
            if len(self._got) < _HEADER.size:
                self._wake_from(1)
                return False
            self._check(into.nbytes)
            self._came_at = time.perf_counter()
        came -= min(came, left)
        # The end of the connection shows as 0 bytes, and so does a message of no bytes: hence the test above.
        self._receives[0] = into = into[came:]
        self.received += came
        if not into.nbytes:
            self._receives.popleft()
            self._got.clear()
            self.through[1] += 1
            return True
        self._wake_from(min(into.nbytes, WAKE_BYTES))
        return False  # the system gave what there was

    def _wake_from(self, nbytes: int) -> None:
        if nbytes != self._wake_at:
            self._wake_at = nbytes
            # Only where it changes: the call is made for each message otherwise, and costs as much as a small receive.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _check(self, expected: int) -> None:
        number, length = _HEADER.unpack(self._got)
        if (number, length) != (self.through[1], expected):
            raise AssertionError(
                f"message {number} of {length} bytes came from {self.name}, and message {self.through[1]} of "
                f"{expected} bytes was expected: the ranks do not agree on the order of their messages, or on a shape "
                "or type"
            )


def move_until(
    connections: Iterable[RankConnection],
    holds: Callable[[], bool],
    *,
    clock: WaitClock,
    seconds: float,
    moved: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Moves the messages of these connections until a condition holds, and returns when it began and ended. ``moved``
    is called when some bytes may have moved. Raises PeerLost where nothing has moved for this many seconds."""
    own = list(connections)
    keys = {id(connection) for connection in own}
    began = last = time.perf_counter()
    before = -1
    poller, watched = select.poll(), dict.fromkeys(own, 0)
    clock.begin()
    try:
        while True:
            # Before the look at the condition: whatever moves after it would not be noticed before the poll ends.
            others = clock.move_on(but=keys)
            for connection in own:
                if connection.events:
                    connection.move()
            if moved is not None:
                moved()
            if holds():
                return began, time.perf_counter()
            done = sum(connection.sent + connection.received for connection in own)
            now = time.perf_counter()
            if done != before:
                before, last = done, now
            # The deadline is of progress and not of the whole wait: a large message over a slow cable may take longer.
            elif now - last > seconds:
                late = ", ".join(connection.name for connection in own if connection.events)
                raise PeerLost(f"nothing has come from or gone to {late} for {seconds:.0f} s")
            for connection, events in watched.items():
                if connection.events != events:
                    watched[connection] = connection.events
                    poller.register(connection, connection.events)
            poller.poll((NAP_SECONDS if others else LOOK_SECONDS) * 1000)
    finally:
        clock.end()
        clock.seconds += time.perf_counter() - began


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    numbers: Any = bytes_of(tensor).numpy()
    return memoryview(numbers)
