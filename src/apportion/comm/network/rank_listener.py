"""The place where other ranks connect: a thread that lets in each end that proves to know the secret, and no other.

A stranger costs a connection for PENDING_SECONDS at most and never more than its handshake's bytes of memory. Where
MOST_PENDING connections wait for theirs, the stranger that has waited longest is closed; where all of them are ranks'
(``PendingHandshakes``), new ones wait in the system's queue until a rank is in. A connection that is closed for
want of room is reset, so that a rank at the other end knows that its secret was not refused, and dials again. What goes
wrong with one connection ends that connection, and neither the thread nor the port.

A connection is a rank's once it has sent a hello that was made with the secret, and a stranger's until then. A hello
that has been seen before, since it may have been recorded, counts for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import socket
import struct
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import final

from apportion.comm.network.address import Address, is_own_user, listen, prepare
from apportion.comm.network.handshake import (
    CLAIM_BYTES,
    HELLO,
    HELLO_BYTES,
    SECRET_ENV,
    greet,
    named,
    nonce_of_hello,
    proof_of,
    unpack,
)
from apportion.errors import PeerLost

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


PENDING_SECONDS = 5.0
"""The seconds that a handshake may take which has not begun with a rank's hello."""
RANK_SECONDS = 30.0
"""The seconds that a rank's handshake may take: where hundreds begin at once, their processors are busy."""
MOST_PENDING = 2048
"""The most handshakes at once, where the limit of open files (RLIMIT_NOFILE) is at least four times as high; else a
quarter of that limit."""
_DESCRIPTORS = 1 << 14
"""The limit of open files that is asked of the system: a rank has a connection to each other one."""
_LOOK_SECONDS = 1.0
"""The longest time between two looks for handshakes that take too long."""
_REST_SECONDS = 0.05
"""The seconds until the next try where the system has no descriptor left for a connection."""
_AT_ONCE = 64
"""The most connections that are accepted before others are read again."""
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER, as whose effect close() sends a reset."""


Taker = Callable[[int, socket.socket], None]
"""A function that takes the connection of a rank."""


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
        self._pending = PendingHandshakes(secret)
        self._most_pending = min(MOST_PENDING, _descriptors() // 4)
        self._accepts = True
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
        where it has not in this many seconds, the listener was closed, or ``stopped()`` says so after ``wake``."""
        key = (named(name), rank)
        with self._changed:
            self._changed.wait_for(lambda: key in self._ready or self._closed or stopped(), seconds)
            if key in self._ready:
                return self._ready.pop(key)
            why = "it was closed here" if self._closed or stopped() else f"it did not connect in {seconds:.0f} s"
        raise PeerLost(f"rank {rank} is not there: {why}")

    def poll(self, name: str, rank: int, seconds: float) -> socket.socket | None:
        """Returns a rank's connection as ``take`` does, but None where it has not come in this many seconds."""
        key = (named(name), rank)
        with self._changed:
            self._changed.wait_for(lambda: key in self._ready, seconds)
            return self._ready.pop(key, None)

    def ready(self, name: str) -> list[int]:
        """Returns the ranks that have connected for the group of this name, and whose connections have not been
        taken."""
        own = named(name)
        with self._changed:
            return sorted(rank for group, rank in self._ready if group == own)

    def hand_over(self, name: str, taker: Taker | None) -> None:
        """Gives the connections for the group of this name to a function from now on, as they come, those that wait
        already among them. It is called in the listener's thread, and must not wait. None: to none any more."""
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
        # A taker, which runs in the listener's thread, may close the listener; a thread cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the listener's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(_LOOK_SECONDS if self._pending else None):
                    if key.fileobj is self._sock:
                        self._accept_some()
                    elif key.fileobj is not self._woken:
                        self._serve(key.fd)
                self._drop_late()
                self._accept_again()
        finally:
            with self._changed:
                self._closed = True
                left = [*self._ready.values(), *(pending.sock for pending in self._pending)]
                self._ready.clear()
                self._changed.notify_all()
            for sock in (*left, self._sock, self._woken, self._wake):
                sock.close()
            self._selector.close()

    def _accept_some(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._pending) >= self._most_pending and self._pending.oldest_stranger() is None:
                self._stop_accepting()
                return
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno in _SCARCE and not self._drop_oldest_stranger():
                    time.sleep(_REST_SECONDS)
                return
            has_room = len(self._pending) < self._most_pending or self._drop_oldest_stranger()
            self._greet(sock)
            if not has_room:  # this one is the last beyond the limit
                self._stop_accepting()
                return

    def _stop_accepting(self) -> None:
        """Leaves new connections to the system's queue: those that wait are ranks, and none is closed for another."""
        self._accepts = False
        self._selector.unregister(self._sock)

    def _accept_again(self) -> None:
        if not self._accepts and len(self._pending) < self._most_pending:
            self._accepts = True
            self._selector.register(self._sock, selectors.EVENT_READ)

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            if self._unix and not is_own_user(sock):
                raise PermissionError
            if not self._unix:
                prepare(sock)
            pending = PendingHandshake(sock)
            sock.send(pending.greeting)  # of some bytes, which the new connection has room for
            self._selector.register(sock, selectors.EVENT_READ)
        except OSError:
            sock.close()
            return
        self._pending.add(pending)

    def _serve(self, descriptor: int) -> None:
        """Reads what a connection has sent, unless it was closed after the system reported it as readable."""
        pending = self._pending.find(descriptor)
        if pending is None:
            return
        try:
            self._read(pending)
        except Exception:  # a defect, which must not take the port from all other ranks
            traceback.print_exc()
            self._drop(pending)

    def _read(self, pending: PendingHandshake) -> None:
        while True:
            try:
                got = pending.sock.recv(pending.missing())
            except BlockingIOError:
                return
            except OSError:
                got = b""
            if not got:
                self._drop(pending)
                return
            self._pending.receive(pending, got)
            claimed = pending.claim()
            if claimed is not None:
                self._decide(pending, claimed)
                return

    def _decide(self, pending: PendingHandshake, claimed: bytes) -> None:
        proved = proof_of(self._secret, pending.greeting, claimed)
        if proved is None:
            self.refused += 1
            if self.refused == 1:  # a user's mistake, or a stranger: once is enough
                self._report_refused(pending)
            self._drop(pending)
            return
        purpose, proof = proved
        self._forget(pending)
        key = unpack(purpose)
        # The proof is sent under the lock: the rank may call for its connection as soon as it has it, and must not come
        # before it is entered here.
        with self._changed:  # a rank that has read the proof is found among those that are in
            try:
                pending.sock.send(proof)
            except OSError:
                pending.sock.close()
                return
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

    def _report_refused(self, pending: PendingHandshake) -> None:
        with contextlib.suppress(OSError):
            who = pending.sock.getpeername()[0] if not self._unix else "a process of this host"
            sys.stderr.write(
                f"{who} was not let in at {self.address}: it does not know what is in the file that {SECRET_ENV} names "
                "here (every host needs the same file), or is of another run\n"
            )
            sys.stderr.flush()

    def _drop_late(self) -> None:
        for pending in self._pending.late(PENDING_SECONDS, RANK_SECONDS):
            self._reset(pending)

    def _drop_oldest_stranger(self) -> bool:
        """Closes the stranger that has waited longest, unless its hello can be read by now. Returns whether a
        connection was closed."""
        before = len(self._pending)
        while (oldest := self._pending.oldest_stranger()) is not None:
            self._serve(oldest.sock.fileno())
            if self._pending.oldest_stranger() is oldest:
                self._reset(oldest)
            if len(self._pending) < before:
                return True
        return False

    def _reset(self, pending: PendingHandshake) -> None:
        if not self._unix:
            with contextlib.suppress(OSError):
                # A close in order would look like a refusal of the claim (``dialling``); a reset says that it was for
                # want of room.
                pending.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._drop(pending)

    def _drop(self, pending: PendingHandshake) -> None:
        if pending.sock.fileno() >= 0:
            self._forget(pending)
            pending.sock.close()

    def _forget(self, pending: PendingHandshake) -> None:
        if self._pending.find(pending.sock.fileno()) is pending:
            self._selector.unregister(pending.sock)
            self._pending.remove(pending)


def _descriptors() -> int:
    """Raises this process's limit of open files towards what a rank among hundreds needs, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
