"""The way to a rank that listens: trying until it is there, and the handshake as the end that dials makes it."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum

from apportion.comm.network.address import Address, dial
from apportion.comm.network.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    SECRET_ENV,
    Purpose,
    claim,
    hello,
    is_proved,
)
from apportion.errors import PeerLost

HANDSHAKE_SECONDS = 10.0
"""The seconds that a handshake may take, seen from the end that dials."""
REFUSED_SECONDS = 5.0
"""The seconds for which a rank tries again whose proof is refused: an earlier meeting may be closing."""
SEARCH_SECONDS = 60.0
"""The same where there are several addresses: another run may listen at one before rank 0 does at the next."""
_RETRY_SECONDS = 0.02, 0.3
"""The first and the longest pause between two tries to connect."""
_jitter = random.Random()
"""What spreads the tries of ranks that began at once; the generator that workloads draw from is left alone."""
Stopped = Callable[[], bool]
"""A function that says whether a wait is to end."""


def dial_rank(
    address: Address, secret: bytes, purpose: Purpose, seconds: float, stopped: Stopped = lambda: False
) -> socket.socket:
    """Connects to a rank that listens at an address, or will in this many seconds, and proves that this one knows the
    secret. Raises PeerLost where no rank answers in time, what answers does not know the secret, or ``stopped()``. A
    connection that the other end resets before the handshake is over is made again until then."""
    return dial_first([address], secret, purpose, seconds, stopped)[0]


class _Answer(Enum):
    """How a handshake ended."""

    PROVED = 1
    REFUSED = 2
    """The other end read the whole claim and hung up, or answered with what is not a proof."""
    INTERRUPTED = 3
    """The connection was reset, or nothing came in time: this says nothing about the secret."""


def dial_first(
    addresses: Sequence[Address],
    secret: bytes,
    purpose: Purpose,
    seconds: float,
    stopped: Stopped = lambda: False,
) -> tuple[socket.socket, Address]:
    """Connects as ``dial_rank`` does, but to a rank that listens at any one of some addresses, and returns that too."""
    end = time.monotonic() + seconds
    patience = REFUSED_SECONDS if len(addresses) == 1 else SEARCH_SECONDS
    pause, longest = _RETRY_SECONDS
    refused_since: float | None = None
    interrupted = 0
    why = ""
    while True:
        for address in addresses:
            if stopped():
                raise PeerLost(f"the connection to {address} was lost: it was closed here")
            left = max(0.1, end - time.monotonic())
            try:
                sock = dial(address, min(HANDSHAKE_SECONDS, left))
            except OSError as error:
                if refused_since is None and not interrupted:
                    why = f"nothing answers at {_written(addresses)} ({error})"
                continue
            answer = _shake_hands(sock, secret, purpose, min(HANDSHAKE_SECONDS, left))
            if answer is _Answer.PROVED:
                return sock, address
            sock.close()
            if answer is _Answer.INTERRUPTED:
                refused_since = None
                interrupted += 1
                why = (
                    f"{address} ended the connection of this rank {interrupted} times before the handshake was over: "
                    "something listens there, and is closing, or has more connections than it can hold"
                )
                continue
            refused_since = time.monotonic() if refused_since is None else refused_since
            why = (
                f"{address} did not let this rank in: {SECRET_ENV} must name a file with the same contents on every "
                "host, and the ranks must be of one run"
            )
            if time.monotonic() - refused_since > patience:
                raise PeerLost(why)
        if time.monotonic() + pause > end:
            raise PeerLost(why)
        time.sleep(pause * _jitter.uniform(0.5, 1.0))
        pause = min(2 * pause, longest)


def _written(addresses: Sequence[Address]) -> str:
    first, *others = addresses
    return f"{first} to {others[-1].port}" if others else str(first)


def _shake_hands(sock: socket.socket, secret: bytes, purpose: Purpose, seconds: float) -> _Answer:
    """Proves to the other end that this one knows the secret, and returns whether the other has proved it too."""
    sock.settimeout(seconds)
    has_claimed = False
    try:
        sock.sendall(hello(secret))
        greeting = read_exactly(sock, GREETING_BYTES)
        claimed = claim(secret, greeting, purpose.pack())
        sock.sendall(claimed)
        has_claimed = True
        proof = read_exactly(sock, PROOF_BYTES)
    except ConnectionEnded:  # not reset: the listener resets what it closes unread
        return _Answer.REFUSED if has_claimed else _Answer.INTERRUPTED
    except OSError:
        return _Answer.INTERRUPTED
    except ValueError:  # something else listens there
        return _Answer.REFUSED
    return _Answer.PROVED if is_proved(secret, greeting, claimed, proof) else _Answer.REFUSED


class ConnectionEnded(ConnectionResetError):
    """The other end has closed the connection in order."""


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Returns this many bytes of a connection. Raises OSError where it ends before, and ConnectionEnded where it
    was closed in order."""
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise ConnectionEnded("the connection ended")
        data += got
    return data
