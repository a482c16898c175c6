"""The way to a rank that listens: trying until it is there, and the handshake as the end that dials makes it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from apportion.comm.network.address import Address, dial
from apportion.comm.network.handshake import GREETING_BYTES, PROOF_BYTES, Purpose, claim, is_proved
from apportion.comm.network.secret import NAME
from apportion.errors import PeerLost

HANDSHAKE_SECONDS = 10.0
"""The seconds that a handshake may take, seen from the end that dials."""
REFUSED_SECONDS = 5.0
"""The seconds for which a rank tries again that is not let in: strangers may have taken its place in the queue."""
SEARCH_SECONDS = 60.0
"""The same where there are several addresses: another run may listen at one before rank 0 does at the next."""
_RETRY_SECONDS = 0.02, 0.3
"""The first and the longest pause between two tries to connect."""
Stopped = Callable[[], bool]
"""A function that says whether a wait is to end."""


def dial_rank(
    address: Address, secret: bytes, purpose: Purpose, seconds: float, stopped: Stopped = lambda: False
) -> socket.socket:
    """Connects to a rank that listens at an address, or will within so many seconds, and proves that this one knows the
    secret. Raises PeerLost where nobody answers in time, what answers does not know the secret, or ``stopped()``."""
    return dial_first([address], secret, purpose, seconds, stopped)[0]


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
    while True:
        for address in addresses:
            if stopped():
                raise PeerLost(f"the connection to {address} was lost: it was closed here")
            try:
                sock = dial(address, min(HANDSHAKE_SECONDS, max(0.1, end - time.monotonic())))
            except OSError as error:
                if time.monotonic() + pause > end:
                    raise PeerLost(f"nobody answers at {_written(addresses)} ({error})") from error
                continue
            if _shake_hands(sock, secret, purpose):
                return sock, address
            sock.close()
            refused_since = time.monotonic() if refused_since is None else refused_since
            if time.monotonic() - refused_since > patience:
                raise PeerLost(
                    f"{address} did not let this rank in: {NAME} must name a file with the same contents on every "
                    "host, and the ranks must be of one run"
                )
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, longest)


def _written(addresses: Sequence[Address]) -> str:
    first, *others = addresses
    return f"{first} to {others[-1].port}" if others else str(first)


def _shake_hands(sock: socket.socket, secret: bytes, purpose: Purpose) -> bool:
    """Proves to the other end that this one knows the secret, and returns whether the other has proved it too."""
    sock.settimeout(HANDSHAKE_SECONDS)
    try:
        greeting = read_exactly(sock, GREETING_BYTES)
        claimed = claim(secret, greeting, purpose.pack())
        sock.sendall(claimed)
        return is_proved(secret, greeting, claimed, read_exactly(sock, PROOF_BYTES))
    except (OSError, ValueError):
        return False


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Returns so many bytes of a connection. Raises OSError where it ends before."""
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise ConnectionResetError("the connection ended")
        data += got
    return data
