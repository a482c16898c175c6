"""The place where other ranks connect: a thread that lets in whoever proves that it knows the secret, and nobody else.

A stranger costs a connection for PENDING_SECONDS at most and never more than its handshake's bytes of memory; where
MOST_PENDING wait for theirs, the one that has waited longest makes room. None of it is seen by the ranks that are in.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from apportion.comm.network.address import Address, is_own_user, listen, prepare
from apportion.comm.network.handshake import CLAIM_BYTES, greet, named, proof_of, unpack
from apportion.comm.network.secret import NAME
from apportion.errors import PeerLost

PENDING_SECONDS = 5.0
"""The seconds that a handshake may take."""
MOST_PENDING = 64
"""The number of handshakes at once."""
_REST_SECONDS = 0.05
"""The seconds until the next try where the system has no descriptor left for a connection."""


Taker = Callable[[int, socket.socket], None]
"""A function that takes the connection of a rank."""


@final
class _Unproved:
    """A connection whose other end has not proved itself yet."""

    __slots__ = ("claimed", "greeting", "since", "sock")

    def __init__(self, sock: socket.socket, greeting: bytes) -> None:
        self.sock, self.greeting, self.claimed, self.since = sock, greeting, b"", time.monotonic()


@final
class RankListener:
    """Listens at an address, and keeps the connections of ranks until they are asked for."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self._sock, self.address = listen(address)
        self._sock.setblocking(False)
        self._secret, self._unix = secret, not self.address.port
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._ready: dict[tuple[bytes, int], socket.socket] = {}
        self._pending: dict[int, _Unproved] = {}
        self._takers: dict[bytes, Taker] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.refused = 0
        """The number of connections that claimed to know the secret and did not."""
        self.on_ready: Callable[[], None] = lambda: None
        """A function that is called, in another thread, when a rank has been let in."""
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    @classmethod
    def at_first(cls, addresses: Sequence[Address], secret: bytes) -> RankListener:
        """Listens at the first address that can be had. Raises OSError where there is none."""
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return cls(address, secret)
        return cls(addresses[-1], secret)

    def take(self, name: str, rank: int, seconds: float, stopped: Callable[[], bool] = lambda: False) -> socket.socket:
        """Waits until this rank has connected for the group of this name, and returns the connection. Raises PeerLost
        where it has not within so many seconds, the listener was closed, or ``stopped()`` says so after ``wake``."""
        key = (named(name), rank)
        with self._changed:
            self._changed.wait_for(lambda: key in self._ready or self._closed or stopped(), seconds)
            if key in self._ready:
                return self._ready.pop(key)
            why = "it was closed here" if self._closed or stopped() else f"it did not connect in {seconds:.0f} s"
        raise PeerLost(f"rank {rank} is not there: {why}")

    def poll(self, name: str, rank: int, seconds: float) -> socket.socket | None:
        """Returns a rank's connection as ``take`` does, but None where it has not come within so many seconds."""
        key = (named(name), rank)
        with self._changed:
            self._changed.wait_for(lambda: key in self._ready, seconds)
            return self._ready.pop(key, None)

    def ready(self, name: str) -> list[int]:
        """Returns the ranks that have connected for the group of this name, and whose connections nobody has taken."""
        own = named(name)
        with self._changed:
            return sorted(rank for group, rank in self._ready if group == own)

    def hand_over(self, name: str, taker: Taker | None) -> None:
        """Gives the connections for the group of this name to a function from now on, as they come, those that wait
        already among them. It is called in the listener's thread, and must not wait. None: to nobody any more."""
        key = named(name)
        with self._changed:
            if taker is None:
                self._takers.pop(key, None)
                return
            self._takers[key] = taker
            waiting = [(rank, self._ready.pop((of, rank))) for of, rank in list(self._ready) if of == key]
        for rank, sock in waiting:
            taker(rank, sock)

    def wake(self) -> None:
        """Has those that wait for a rank ask whether they are to stop. May be called from any thread."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stops listening. May be called from any thread, and more than once."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the listener's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(PENDING_SECONDS if self._pending else None):
                    if key.fileobj is self._sock:
                        self._accept()
                    elif key.fileobj is not self._woken:
                        self._read(self._pending[key.fd])
                self._drop_late()
        finally:
            with self._changed:
                left = [*self._ready.values(), *(pending.sock for pending in self._pending.values())]
                self._ready.clear()
            for sock in (*left, self._sock, self._woken, self._wake):
                sock.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: whoever has waited longest gives one back
            if not self._drop_oldest():
                time.sleep(_REST_SECONDS)
            return
        try:
            sock.setblocking(False)
            if self._unix and not is_own_user(sock):
                raise PermissionError
            if not self._unix:
                prepare(sock)
            pending = _Unproved(sock, greet())
            sock.send(pending.greeting)  # of some bytes, which the new connection has room for
        except OSError:
            sock.close()
            return
        if len(self._pending) >= MOST_PENDING:
            self._drop_oldest()
        self._pending[sock.fileno()] = pending
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, pending: _Unproved) -> None:
        try:
            got = pending.sock.recv(CLAIM_BYTES - len(pending.claimed))
        except BlockingIOError:
            return
        except OSError:
            got = b""
        pending.claimed += got
        if not got:
            self._drop(pending)
        elif len(pending.claimed) == CLAIM_BYTES:
            self._decide(pending)

    def _decide(self, pending: _Unproved) -> None:
        proved = proof_of(self._secret, pending.greeting, pending.claimed)
        if proved is None:
            self.refused += 1
            if self.refused == 1:  # a user's mistake, or a stranger: once is enough
                self._tell_refused(pending)
            self._drop(pending)
            return
        purpose, proof = proved
        self._forget(pending)
        try:
            pending.sock.send(proof)
        except OSError:
            pending.sock.close()
            return
        key = unpack(purpose)
        with self._changed:
            taker = self._takers.get(key[0])
            if taker is not None:
                taker(key[1], pending.sock)
                return
            before = self._ready.pop(key, None)
            self._ready[key] = pending.sock
            self._changed.notify_all()
        if before is not None:  # the rank has dialled again
            before.close()
        self.on_ready()

    def _tell_refused(self, pending: _Unproved) -> None:
        with contextlib.suppress(OSError):
            who = pending.sock.getpeername()[0] if not self._unix else "a process of this host"
            sys.stderr.write(
                f"{who} was not let in at {self.address}: it does not know what is in the file that {NAME} names here "
                "(every host needs the same file), or is of another run\n"
            )
            sys.stderr.flush()

    def _drop_late(self) -> None:
        limit = time.monotonic() - PENDING_SECONDS
        for pending in [p for p in self._pending.values() if p.since < limit]:
            self._drop(pending)

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, pending: _Unproved) -> None:
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: _Unproved) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock.fileno()]
