"""The bytes that have come from a client and are not read yet."""

from __future__ import annotations

from typing import final

from apportion.serving.http.request_head import END, MOST_BYTES, Head, HeadReader
from apportion.serving.http.response import HTTPError

_FIRST_ROOM = 64 << 10
"""The number of bytes that are received at once: a small request comes whole."""


@final
class ReceiveBuffer:
    """A buffer that grows as far as one head needs, and the reader of the head that is in it."""

    __slots__ = ("_reader", "begin", "end", "fed", "memory")

    def __init__(self) -> None:
        self.memory = bytearray(_FIRST_ROOM)
        """The memory of the bytes."""
        self.begin = self.end = self.fed = 0
        """The places where the unread bytes begin and end, and up to which a head has been read: at or before its
        beginning, where none of it has."""
        self._reader = HeadReader()

    def room(self) -> memoryview:
        """Return memory for what comes next."""
        if self.begin and self.end == len(self.memory):
            left = self.end - self.begin
            self.memory[:left] = self.memory[self.begin : self.end]
            self.begin, self.end, self.fed = 0, left, self.fed - self.begin
        if self.end == len(self.memory):
            self.memory = self.memory + bytearray(len(self.memory))
        return memoryview(self.memory)[self.end :]

    def begin_head(self) -> None:
        """Find where a head begins: an empty line before a request does not belong to it."""
        while self.memory.startswith(b"\r\n", self.begin, self.end):
            self.begin += 2
        self.fed = self.begin

    def take_head(self) -> Head | None:
        """Read what has come of a head, and return it once it is complete. Raises HTTPError."""
        at = self.memory.find(END, max(self.begin, self.fed - len(END) + 1), self.end)
        end = self.end if at < 0 else at + len(END)
        if end - self.begin > MOST_BYTES:
            raise HTTPError(431, f"the request's head has more than {MOST_BYTES} bytes")
        self._reader.feed(self.memory[self.fed : end])
        self.fed = end
        if at < 0:
            return None
        head, self._reader = self._reader.head(), HeadReader()
        self.begin = end
        return head
