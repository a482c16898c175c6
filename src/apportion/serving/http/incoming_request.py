"""A request whose head has come, and its body as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from apportion.serving.http.chunked_body import Chunks
from apportion.serving.http.request_head import Head
from apportion.serving.http.response import Response
from apportion.serving.pool.shared_arena import Lease

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
