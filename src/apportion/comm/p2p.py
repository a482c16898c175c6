"""Messages from one process of a host to another, in memory that both map: a ring for each pair and direction.

::

    sender    tensor -> | header | piece | piece | ... |   the head goes on, with each piece
    receiver            | header | piece -> tensor         the tail follows

A message is written as far as there is room, without waiting for the receiver; a large one streams through in
pieces that stay in cache. Where the receiver has taken everything, the sender begins at the ring's start again, so
no more memory is touched than was ever under way. Both ends count lines of 64 bytes; each belongs to a generation, and
what the ends of an older one have left is not a message.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import final

from torch import Tensor

from apportion.comm.group import DONE, WaitClock, Work
from apportion.comm.sync import CACHE_LINE, Word, fence, full_fence, wake

RING = 8 << 20
"""The bytes that may be under way from one rank to another: a power of two."""
PIECE = 256 << 10
"""The bytes that are published at once: with the receiver's it fits a core's second-level cache."""
_LINES = RING // CACHE_LINE
_MASK = (1 << 32) - 1
_HOT = PIECE // CACHE_LINE
"""The number of lines that small messages go through before they begin again."""
_COUNT, _GENERATION, _ASLEEP, _BASE = 0, 1, 2, 3
_HEADS = 2 * CACHE_LINE

nbytes = _HEADS + RING
"""The bytes of the memory of a pair, one way."""
Wait = Callable[[Word, Word, Callable[[], bool]], None]
"""A function that waits until the condition holds, which may happen when the first word changes; the second word says
that this process sleeps."""


class _End(ABC):
    """One of the two ends: its queue of messages, its own count of lines, which it alone writes, and the other's."""

    _side: int
    """The place of this end's words in the memory: 0 for the sender's, 1 for the receiver's."""

    def __init__(self, memory: memoryview, generation: int, waits: WaitClock, wait: Wait) -> None:
        self._waits, self._wait = waits, wait
        self._queue: deque[Tensor] = deque()
        self._moved = -1
        """The bytes of the first message in the queue that have passed; -1: not even its header has."""
        self._started = self._through = 0
        words = [[Word.from_buffer(memory, at * CACHE_LINE + 4 * word) for word in range(3)] for at in range(2)]
        self._own, mark, self.asleep = words[self._side]
        self.word, self._others_mark, self._other_sleeps = words[1 - self._side]
        self._memory, self._generation = memory, generation
        self._ring = ctypes.addressof(ctypes.c_char.from_buffer(memory, _HEADS))
        self._begins = Word.from_buffer(memory, 4 * _BASE)
        """The count at which the ring was last begun anew; the sender writes it."""
        self._lines = self._base = 0
        mark.value = -1  # a rank that still looks for the count of an older generation does not find one
        fence()
        self._own.value = 0
        self.asleep.value = 0
        fence()
        mark.value = generation

    @abstractmethod
    def is_through(self, number: int) -> bool:
        """Move on what can be moved; returns whether the message of this number has passed."""

    def wait(self, number: int) -> None:
        """Wait until the message of this number has passed."""
        if not self.is_through(number):
            self._wait(self.word, self.asleep, lambda: self.is_through(number))
        if not self._queue:
            self._waits.moving.pop(id(self), None)

    def _others(self) -> int:
        """The other end's count; 0 until it has begun this generation."""
        if self._others_mark.value != self._generation:
            return 0
        fence()
        return self.word.value

    def _span(self, most: int, lines: int) -> tuple[int, int]:
        """The (address, bytes) of what is next, of this many bytes and lines."""
        at = (self._lines - self._base) % _LINES
        return self._ring + at * CACHE_LINE, min(most, PIECE, lines * CACHE_LINE, (_LINES - at) * CACHE_LINE)

    def _publish(self) -> None:
        # The piece, or what was read of it, comes before the count: a receiver that sees the count finds the piece
        # whole, and a sender that sees it may overwrite the lines.
        fence()
        self._own.value = self._lines
        # See ``Barrier.until``: write the count, then look for a sleeper, with a full fence between. A system call for
        # each piece would cost more than the copy.
        full_fence()
        if self._other_sleeps.value:
            wake(self._own)


@final
class Sender(_End):
    """The end that writes."""

    _side = 0

    def send(self, tensor: Tensor) -> Work:
        """Send a message, see ``Group.send``."""
        assert tensor.is_contiguous(), "what is sent is contiguous"
        self._queue.append(tensor.detach())
        self._started += 1
        if self._push() == 0:
            return DONE
        self._waits.moving[id(self)] = self._moves
        return _UnderWay(self, self._started)

    def _moves(self) -> bool:
        return self._push() > 0

    def is_through(self, number: int) -> bool:
        self._push()
        return self._through >= number

    def _push(self) -> int:
        """Write what there is room for, and return the number of messages that are left."""
        while self._queue:
            tensor = self._queue[0]
            size = tensor.nbytes
            # Both counts wrap round at 32 bits, and so does their difference; what is under way is never above the
            # ring.
            room = _LINES - ((self._lines - self._others()) & _MASK)
            if room == 0:
                break
            if self._moved < 0:
                self._begin(size, is_empty=room == _LINES)
                room -= 1
            at, n = self._span(size - self._moved, room)
            if n:
                ctypes.memmove(at, tensor.data_ptr() + self._moved, n)
                self._moved += n
                self._lines += -(-n // CACHE_LINE)
            self._publish()
            if self._moved == size:
                self._queue.popleft()
                self._moved = -1
                self._through += 1
        return len(self._queue)

    def _begin(self, size: int, *, is_empty: bool) -> None:
        if is_empty and self._lines - self._base >= _HOT:
            # Only where the receiver has read everything: it reads the new base with the header that follows, and has
            # no position of its own in the ring that this could invalidate.
            self._base = self._lines
            self._begins.value = self._lines
        # The count has come round to the value of an old beginning, by which the receiver would rewind although the
        # sender has not: another value, which no header has, takes it away.
        elif self._begins.value & _MASK == self._lines & _MASK:  # of a ring begun long ago
            self._begins.value = self._lines - 1
        at, _ = self._span(CACHE_LINE, 1)
        ctypes.c_int64.from_address(at).value = size
        self._lines += 1
        self._moved = 0


@final
class Receiver(_End):
    """The end that reads."""

    _side = 1

    def receive(self, into: Tensor) -> Work:
        """Receive a message, see ``Group.receive``."""
        assert into.is_contiguous(), "what is received into is contiguous"
        self._queue.append(into.detach())
        self._started += 1
        self._waits.moving[id(self)] = self._moves
        return _UnderWay(self, self._started)

    def _moves(self) -> bool:
        self._pull()
        return bool(self._queue)

    def is_through(self, number: int) -> bool:
        if self._through < number:
            self._pull()
        return self._through >= number

    def _pull(self) -> None:
        """Read what there is in the ring."""
        while self._queue:
            there = (self._others() - self._lines) & _MASK
            if there == 0:
                break
            # The count first, then the lines that it tells of.
            fence()
            into = self._queue[0]
            size = into.nbytes
            if self._moved < 0:
                self._begin(size)
                there -= 1
            at, n = self._span(size - self._moved, there)
            if n:
                ctypes.memmove(into.data_ptr() + self._moved, at, n)
                self._moved += n
                self._lines += -(-n // CACHE_LINE)
            self._publish()
            if self._moved == size:
                self._queue.popleft()
                self._moved = -1
                self._through += 1

    def _begin(self, size: int) -> None:
        if self._begins.value & _MASK == self._lines & _MASK:
            self._base = self._lines
        at, _ = self._span(CACHE_LINE, 1)
        sent = ctypes.c_int64.from_address(at).value
        if sent != size:
            raise AssertionError(
                f"a message of {sent} bytes was sent and one of {size} bytes is received: the ranks do not agree on "
                "the order of their messages, or on a shape or type"
            )
        self._lines += 1
        self._moved = 0


@final
class _UnderWay(Work):
    __slots__ = ("_end", "_number")

    def __init__(self, end: _End, number: int) -> None:
        self._end, self._number = end, number

    def wait(self) -> None:
        self._end.wait(self._number)
