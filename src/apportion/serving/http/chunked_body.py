"""A body that comes in chunks (RFC 9112, 7.1): each has its length before it, and one of length 0 is the last."""

from __future__ import annotations

import re

from apportion.serving.http.response import HTTPError

MOST_LINE = 4096
"""The largest number of bytes of a line: a length with what may follow it, or a trailer."""
MOST_TRAILERS = 64 << 10
"""The largest number of bytes of all trailers, which are not read."""
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
        if len(self.body) + self._left > self._most:
            raise HTTPError(413, f"the body has more than {self._most} bytes: say its content-length")
        self._last, self._within = self._left == 0, self._left > 0
        return end + 2
