"""The connections whose other end has not proved itself yet, and which of them is closed where there are too many.

A connection is a rank's once it has sent a hello that was made with the secret, and a stranger's until then. Strangers
are closed before ranks, the one that has waited longest first. A hello that has been seen before, since it may
have been recorded, counts for nothing.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import final

from apportion.comm.network.handshake import CLAIM_BYTES, HELLO, HELLO_BYTES, greet, nonce_of_hello

_MOST_HELLOS = 1 << 16
"""The hellos that are remembered."""


@final
class PendingHandshake:
    """A connection whose other end has not proved itself yet."""

    __slots__ = ("_has_hello", "_received", "greeting", "is_rank", "since", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.greeting, self.since = sock, greet(), time.monotonic()
        self._received, self._has_hello = b"", False
        self.is_rank = False
        """Whether the other end has sent a hello that was made with the secret."""

    def missing(self) -> int:
        """Returns how many bytes may be read next: never more than the handshake has, since what follows is the
        rank's."""
        may_be_hello = not self._has_hello and HELLO.startswith(self._received[: len(HELLO)])
        return (HELLO_BYTES if may_be_hello else CLAIM_BYTES) - len(self._received)

    def receive(self, data: bytes) -> bytes | None:
        """Takes bytes that the other end has sent, and returns the hello when the last byte of it is among them."""
        self._received += data
        if self._has_hello or len(self._received) < HELLO_BYTES or not self._received.startswith(HELLO):
            return None
        found, self._received, self._has_hello = self._received, b"", True
        return found

    def claim(self) -> bytes | None:
        """Returns the claim when all of it is there; else None."""
        return self._received if len(self._received) == CLAIM_BYTES else None


@final
class PendingHandshakes:
    """The connections of one listener whose other end has not proved itself yet, ranks and strangers apart."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._strangers: dict[int, PendingHandshake] = {}  # both in the order of their coming
        self._ranks: dict[int, PendingHandshake] = {}
        self._hellos: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._ranks)

    def __iter__(self) -> Iterator[PendingHandshake]:
        return iter([*self._strangers.values(), *self._ranks.values()])

    def find(self, descriptor: int) -> PendingHandshake | None:
        """Returns the connection of this descriptor; None where it has been closed meanwhile."""
        return self._strangers.get(descriptor) or self._ranks.get(descriptor)

    def add(self, pending: PendingHandshake) -> None:
        """Adds a connection, as a stranger's."""
        self._strangers[pending.sock.fileno()] = pending

    def remove(self, pending: PendingHandshake) -> None:
        """Removes a connection that is still open."""
        self._strangers.pop(pending.sock.fileno(), None)
        self._ranks.pop(pending.sock.fileno(), None)

    def receive(self, pending: PendingHandshake, data: bytes) -> None:
        """Takes bytes of a connection, and counts it among the ranks' from its hello on."""
        given = pending.receive(data)
        nonce = None if given is None else nonce_of_hello(self._secret, given)
        if nonce is None or nonce in self._hellos:
            return
        self._hellos[nonce] = None
        if len(self._hellos) > _MOST_HELLOS:
            self._hellos.popitem(last=False)
        self.remove(pending)
        pending.is_rank = True
        self._ranks[pending.sock.fileno()] = pending

    def oldest_stranger(self) -> PendingHandshake | None:
        """Returns the stranger that has waited longest."""
        return next(iter(self._strangers.values()), None)

    def late(self, stranger_seconds: float, rank_seconds: float) -> list[PendingHandshake]:
        """Returns those that have taken too long."""
        now = time.monotonic()
        return [p for p in self if now - p.since > (rank_seconds if p.is_rank else stranger_seconds)]
