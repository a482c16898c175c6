"""The meeting of ranks that others have started: where each of them listens, and who may connect.

::

    one host        every rank listens on a socket of this host that only its user can reach: no port, no secret
    several hosts   rank 0 listens at MASTER_ADDR:MASTER_PORT (under torchrun, whose own store holds that port, at a
                    free one that the store tells); each rank proves that it knows the secret, tells rank 0 where it
                    listens itself, and is told where the others do

Nothing that torchrun's store says is trusted: whoever answers at the address has to prove itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

from apportion.comm.network.address import Address, dial, is_loopback, route_to
from apportion.comm.network.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    Purpose,
    claim,
    is_proved,
)
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.secret import MAKE, NAME, secret_of_run
from apportion.errors import ApportionError, PeerLost

DEADLINE_SECONDS = 300.0
"""The seconds that ranks wait for each other in a meeting."""
RESOLVE_SECONDS = 20.0
"""The seconds that the name of rank 0's host may take to be known."""
PATIENCE_SECONDS = 10.0
"""The seconds of meeting before a rank says that it waits."""
HANDSHAKE_SECONDS = 10.0
"""The seconds that a handshake may take, seen from the end that dials."""
REFUSED_SECONDS = 5.0
"""The seconds for which a rank tries again that is not let in: strangers may have taken its place in the queue."""
_RETRY_SECONDS = 0.02, 0.3
"""The first and the longest pause between two tries to connect."""
ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the route to it is that to any other host."""
_MOST_BYTES = 64 << 20
"""The most bytes of a message of a meeting, which only ranks send that have proved themselves."""
Stopped = Callable[[], bool]
"""A function that says whether a wait is to end."""
_LENGTH = struct.Struct("!Q")
_OPEN = b"anybody may join this run: env(insecure=True), or a socket of one host and one user"
_numbers = itertools.count()


@final
class Meeting:
    """Ranks that have met: each can be dialled, and dials."""

    def __init__(self, rank: int, listener: RankListener, secret: bytes, name: str) -> None:
        self.rank, self._listener, self._secret, self._name = rank, listener, secret, name
        self.addresses: list[Address] = []
        """The address at which each rank listens."""
        self._made: Counter[str] = Counter()

    def dial(self, rank: int, group: str, stopped: Stopped) -> socket.socket:
        """Connects to a rank, for a group of this name. Raises PeerLost where it is not there."""
        purpose = Purpose(f"{self._name}/{group}", self.rank)
        return dial_rank(self.addresses[rank], self._secret, purpose, DEADLINE_SECONDS, stopped)

    def take(self, rank: int, group: str, stopped: Stopped) -> socket.socket:
        """Waits for a rank to connect, for a group of this name. Raises PeerLost where it does not."""
        return self._listener.take(f"{self._name}/{group}", rank, DEADLINE_SECONDS, stopped)

    def poll(self, rank: int, group: str, seconds: float) -> socket.socket | None:
        """Returns a rank's connection, or None where it has not come within so many seconds."""
        return self._listener.poll(f"{self._name}/{group}", rank, seconds)

    def wake(self) -> None:
        """Has those that wait for a rank to connect ask whether they are to stop. May be called from any thread."""
        self._listener.wake()

    def describe(self, rank: int) -> str:
        """Returns what a rank is called in messages of errors."""
        return f"rank {rank} at {self.addresses[rank]}"

    def another(self, ranks: Sequence[int]) -> str:
        """Returns a name for a group of these ranks: the same on each of them, and another one each time."""
        name = ",".join(map(str, ranks))
        self._made[name] += 1
        return f"{name}/{self._made[name]}"

    def close(self) -> None:
        """Stops to listen for other ranks."""
        self._listener.close()


def meet(rank: int, size: int, *, one_host: bool, insecure: bool) -> Meeting:
    """Meets the other ranks, and returns once all of them are there.

    ``one_host``: the ranks are processes of this host and this user. ``insecure``: ranks of several hosts need no
    secret, and whoever reaches the port may take one's place.
    """
    name = "/".join((*_run_name(os.environ), str(next(_numbers))))
    secret = _OPEN if insecure or one_host else secret_of_run(os.environ)
    if secret is None:
        raise ValueError(
            f"the ranks run on several hosts, and {NAME} is not set: whoever reaches a port could take a rank. Make a "
            f"secret with {MAKE}, copy it to every host, and set {NAME}=~/apportion-secret there; or say "
            "env(insecure=True) where nobody else reaches these hosts"
        )
    waits = threading.Timer(PATIENCE_SECONDS, _say_waiting, [rank, size])
    waits.daemon = True
    waits.start()
    try:
        place = _OneHost(name) if one_host else _SeveralHosts(name)
        return _gather(place, size, secret, name) if rank == 0 else _report(place, rank, secret, name)
    except (OSError, PeerLost) as error:
        raise ApportionError(
            f"rank {rank} of {size} could not meet the others at {_where()}: {error}; check that rank 0 runs there, "
            "that every rank was started, and that the port is open between the hosts"
        ) from error
    finally:
        waits.cancel()


def _gather(place: _OneHost | _SeveralHosts, size: int, secret: bytes, name: str) -> Meeting:
    """Learns, as rank 0, where every rank listens, and tells all of them."""
    meeting = Meeting(0, RankListener(place.of_rank_0(), secret), secret, name)
    try:
        place.tell(meeting._listener.address)
        addresses, waiting = [meeting._listener.address], []
        end = time.monotonic() + DEADLINE_SECONDS
        with contextlib.ExitStack() as stack:
            for other in range(1, size):
                left = max(0.0, end - time.monotonic())
                sock = stack.enter_context(meeting._listener.take(f"{name}/meeting", other, left))
                sock.setblocking(True)
                sock.settimeout(HANDSHAKE_SECONDS)
                addresses.append(Address(**_receive(sock)))
                waiting.append(sock)
            for sock in waiting:
                _send(sock, [address.__dict__ for address in addresses])
    except BaseException:
        meeting.close()
        raise
    meeting.addresses = addresses
    return meeting


def _report(place: _OneHost | _SeveralHosts, rank: int, secret: bytes, name: str) -> Meeting:
    """Tells rank 0 where this one listens, and learns where the others do."""
    end = time.monotonic() + DEADLINE_SECONDS
    first = place.find_rank_0()
    with dial_rank(first, secret, Purpose(f"{name}/meeting", rank), end - time.monotonic()) as sock:
        meeting = Meeting(rank, RankListener(place.beside(sock, rank), secret), secret, name)
        try:
            sock.settimeout(DEADLINE_SECONDS)
            _send(sock, meeting._listener.address.__dict__)
            told = [Address(**address) for address in _receive(sock)]
        except BaseException:
            meeting.close()
            raise
    meeting.addresses = [first, *told[1:]]  # of rank 0 the address by which it was reached
    return meeting


@final
class _OneHost:
    """Where the ranks of one host and one user listen: sockets whose names follow from the run's."""

    def __init__(self, name: str) -> None:
        self._run = hashlib.sha256(name.encode()).hexdigest()[:16]

    def of_rank_0(self) -> Address:
        """Returns the address at which rank 0 is to listen."""
        return Address(f"{self._run}-0", 0)

    def tell(self, address: Address) -> None:
        """Lets the others know where rank 0 listens."""

    def find_rank_0(self) -> Address:
        """Returns the address at which rank 0 listens, or will."""
        return self.of_rank_0()

    def beside(self, sock: socket.socket, rank: int) -> Address:
        """Returns the address at which a rank is to listen that has reached rank 0 by this connection."""
        return Address(f"{self._run}-{rank}", 0)


@final
class _SeveralHosts:
    """Where the ranks of several hosts listen: rank 0 at MASTER_ADDR, each other at the address by which it reaches
    rank 0."""

    def __init__(self, name: str) -> None:
        self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _wait_until_resolved(self._host)
        from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = _TorchrunStore(self._host, self._port, name) if from_torchrun else None

    def of_rank_0(self) -> Address:
        """Returns the address at which rank 0 is to listen."""
        if self._store is None:
            return Address(self._host, self._port)
        own = route_to(self._host)
        if is_loopback(own) and not is_loopback(self._host):
            own = route_to(ANYWHERE)  # the host's own table says so of its name, and others could not reach that
        return Address(own, -1)

    def tell(self, address: Address) -> None:
        """Lets the others know where rank 0 listens."""
        if self._store is not None:
            self._store.tell(address)

    def find_rank_0(self) -> Address:
        """Returns the address at which rank 0 listens, or will."""
        return Address(self._host, self._port) if self._store is None else self._store.address(DEADLINE_SECONDS)

    def beside(self, sock: socket.socket, rank: int) -> Address:
        """Returns the address at which a rank is to listen that has reached rank 0 by this connection."""
        return Address(sock.getsockname()[0], -1)


def _wait_until_resolved(host: str) -> None:
    """Waits until a name is known: a cluster may make names while ranks start. Raises ApportionError where it is not
    within RESOLVE_SECONDS."""
    end = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ApportionError(
                    f"MASTER_ADDR={host} cannot be resolved ({error}): give the address of rank 0's host"
                ) from error
        time.sleep(_RETRY_SECONDS[1])


def dial_rank(
    address: Address, secret: bytes, purpose: Purpose, seconds: float, stopped: Stopped = lambda: False
) -> socket.socket:
    """Connects to a rank that listens at an address, or will within so many seconds, and proves that this one knows the
    secret. Raises PeerLost where nobody answers in time, what answers does not know the secret, or ``stopped()``."""
    end = time.monotonic() + seconds
    pause, longest = _RETRY_SECONDS
    refused_since: float | None = None
    while True:
        if stopped():
            raise PeerLost(f"the connection to {address} was lost: it was closed here")
        try:
            sock = dial(address, min(HANDSHAKE_SECONDS, max(0.1, end - time.monotonic())))
        except OSError as error:
            if time.monotonic() + pause > end:
                raise PeerLost(f"nobody answers at {address} ({error})") from error
        else:
            if _shake_hands(sock, secret, purpose):
                return sock
            sock.close()
            refused_since = time.monotonic() if refused_since is None else refused_since
            if time.monotonic() - refused_since > REFUSED_SECONDS:
                raise PeerLost(
                    f"{address} did not let this rank in: {NAME} must name a file with the same contents on every "
                    "host, and the ranks must be of one run"
                )
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, longest)


def _shake_hands(sock: socket.socket, secret: bytes, purpose: Purpose) -> bool:
    """Proves to the other end that this one knows the secret, and returns whether the other has proved it too."""
    sock.settimeout(HANDSHAKE_SECONDS)
    try:
        greeting = _exactly(sock, GREETING_BYTES)
        claimed = claim(secret, greeting, purpose.pack())
        sock.sendall(claimed)
        return is_proved(secret, greeting, claimed, _exactly(sock, PROOF_BYTES))
    except (OSError, ValueError):
        return False


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise ConnectionResetError("the connection ended")
        data += got
    return data


def _send(sock: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes is longer than a meeting's")
    return json.loads(_exactly(sock, length))


def _run_name(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what tells this start of this run from others."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return tuple(environment.get(name, "") for name in names)


def _where() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR:MASTER_PORT)"


def _say_waiting(rank: int, size: int) -> None:
    sys.stderr.write(
        f"rank {rank} of {size} has waited {PATIENCE_SECONDS:.0f} s for the others at {_where()} and goes on waiting: "
        "does rank 0 run there, and was every rank started?\n"
    )
    sys.stderr.flush()


@final
class _TorchrunStore:
    """The store of torchrun's agents, in which rank 0 leaves its address."""

    def __init__(self, host: str, port: int, name: str) -> None:
        import torch.distributed as dist  # takes long, and only torchrun's ranks need it

        self._key = f"apportion/{name}/address"
        try:
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=False, timeout=timedelta(seconds=DEADLINE_SECONDS), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise ApportionError(
                f"torchrun's store at {_where()} does not answer: {str(error).splitlines()[0]}"
            ) from error

    def tell(self, address: Address) -> None:
        """Leaves rank 0's address."""
        self._store.set(self._key, json.dumps(address.__dict__))

    def address(self, seconds: float) -> Address:
        """Waits until rank 0 has left its address."""
        try:
            self._store.wait([self._key], timedelta(seconds=seconds))
            found = json.loads(self._store.get(self._key))
            return Address(str(found["host"]), int(found["port"]))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ApportionError(f"rank 0 has left no address in torchrun's store at {_where()}: {error}") from error
