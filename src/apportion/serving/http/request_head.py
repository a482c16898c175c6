"""The head of an HTTP request: llhttp reads it (httptools), and the parts that the server uses are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final
from urllib.parse import unquote

import httptools

from apportion.serving.http.response import HTTPError
from apportion.serving.protocol.v2 import HEADER

MOST_BYTES = 64 << 10
"""The largest size in bytes of a head."""
END = b"\r\n\r\n"
_JSON_BYTES = HEADER.lower().encode()
# A header that decides where a body ends, or whom it is for, must not be given twice: a proxy in front may have taken
# the other one (request smuggling, RFC 9112, 11.2).
_ONCE = (b"host", b"origin", b"content-length", b"transfer-encoding", _JSON_BYTES)


@dataclass(slots=True)
class Head:
    """The head of a request. ``length``: the bytes of the body; None where it comes in chunks, which say themselves
    where it ends."""

    method: str
    path: str
    keep_alive: bool
    length: int | None = 0
    json_bytes: bytes | None = None
    encoding: bytes = b"identity"
    waits: bool = False
    """Tells whether the client waits for a response before it sends the body (``Expect: 100-continue``)."""
    host: bytes | None = None
    origin: bytes | None = None


class HeadReader:
    """The reader of one request's head. ``feed`` takes it in pieces, up to its end and no further."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers = b"", dict[bytes, bytes]()
        self._whole = self._keep_alive = self._newest = False

    def on_url(self, url: bytes) -> None:
        """Called by httptools with a part of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools with a header."""
        name = name.lower()
        if name in _ONCE and name in self._headers:
            raise HTTPError(400, f"{name.decode()} is given twice")
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Called by httptools at the end of the headers. It forgets whether to keep the connection once a request
        without a body is whole."""
        self._whole = True
        self._newest = self._parser.get_http_version() == "1.1"
        self._keep_alive = self._newest and self._parser.should_keep_alive()

    def feed(self, data: bytes | bytearray) -> None:
        """Parse a piece of the head. Raises HTTPError where it is not HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # to what is not offered: the request is answered as it is
            pass
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, HTTPError):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError as error:
            raise HTTPError(400, f"this is not an HTTP request: {error}") from error

    def head(self) -> Head:
        """Return the head, once all of it has been fed. Raises HTTPError where it is incomplete or not supported."""
        if not self._whole:
            raise HTTPError(400, "this is not an HTTP request: its head ends too early")
        found = self._headers
        if self._newest and b"host" not in found:
            raise HTTPError(400, "a request of HTTP/1.1 says by its host header whom it asks: there is none")
        length: int | None = 0
        if (coding := found.get(b"transfer-encoding")) is not None:
            # Both headers at once are refused for the same reason (RFC 9112, 6.3), and other codings because the end of
            # such a body would not be known.
            if coding.strip().lower() != b"chunked" or b"content-length" in found:
                raise HTTPError(
                    400, f"transfer-encoding {_text(coding)!r} is not read: chunked is, or a content-length"
                )
            length = None
        elif (said := found.get(b"content-length")) is not None:
            length = number(b"content-length", said)
        return Head(
            self._parser.get_method().decode(),
            _path(self._url),
            self._keep_alive,
            length,
            found.get(_JSON_BYTES),
            found.get(b"content-encoding", b"identity").strip().lower(),
            self._newest and found.get(b"expect", b"").lower() == b"100-continue",
            found.get(b"host"),
            found.get(b"origin"),
        )


def number(name: bytes, value: bytes) -> int:
    """Return the number of bytes that a header gives. Raises HTTPError where it is not a number."""
    # ``isdigit`` of bytes allows ASCII digits alone: no sign, blank or underscore, which ``int`` would take. 18 digits
    # stay below 2**63.
    if not value.isdigit() or len(value) > 18:
        raise HTTPError(400, f"{name.decode()}: {_text(value)[:60]!r} must be a number of bytes")
    return int(value)


def _path(url: bytes) -> str:
    if not url.startswith(b"/"):
        try:
            url = httptools.parse_url(url).path or b"/"
        except (httptools.HttpParserError, ValueError):
            return _text(url)
    path = url.partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


def _text(value: Any) -> str:
    return bytes(value).decode(errors="replace")


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
            # What is unread is moved to the front only when the buffer has been filled to its end, so that the usual
            # request is never moved.
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
        # The mark may be split between two receives: the search begins three bytes before what is new, and never scans
        # the head twice.
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
