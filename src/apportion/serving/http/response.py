"""The response to a request, and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import orjson

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
