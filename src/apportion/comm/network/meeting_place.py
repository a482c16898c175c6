"""The places where ranks that others have started meet: at sockets of one host, or at MASTER_ADDR.

Under torchrun the store of its agents holds MASTER_PORT; rank 0 listens at a free port, and the store tells which.
Under srun there are several ports, of which rank 0 takes the first that is free.
Nothing that the store says is trusted: the process that answers at the address has to prove itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any, final

from apportion.comm.network.address import Address, is_loopback, route_to
from apportion.comm.network.launched_ranks import other_hosts, ports
from apportion.errors import ApportionError

RESOLVE_SECONDS = 20.0
"""The seconds that the name of rank 0's host may take to be known."""
_PAUSE_SECONDS = 0.3
ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the route to it is that to any other host."""


@final
class OneHost:
    """Where the ranks of one host and one user listen: sockets whose names follow from the run's."""

    has_many = False
    """True where rank 0 may listen at several addresses."""

    def __init__(self, name: str) -> None:
        self._run = hashlib.sha256(name.encode()).hexdigest()[:16]

    def of_rank_0(self) -> list[Address]:
        """Returns the addresses at which rank 0 is to try to listen, in this order."""
        return [Address(f"{self._run}-0", 0)]

    def tell(self, address: Address) -> None:
        """Does nothing: the others know the name by which rank 0 listens."""

    def find_rank_0(self) -> list[Address]:
        """Returns the addresses at one of which rank 0 listens, or will."""
        return self.of_rank_0()

    def beside(self, sock: socket.socket, rank: int) -> Address:
        """Returns the address at which a rank is to listen that has reached rank 0 by this connection."""
        return Address(f"{self._run}-{rank}", 0)


@final
class SeveralHosts:
    """Where the ranks of several hosts listen: rank 0 at MASTER_ADDR, each other at the address by which it reaches
    rank 0. ``seconds``: how long torchrun's store may take."""

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = seconds
        self._host, self._ports = os.environ["MASTER_ADDR"], ports(os.environ)
        self.has_many = len(self._ports) > 1
        """True where rank 0 may listen at several addresses."""
        _wait_until_resolved(self._host)
        from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = _TorchrunStore(self._host, self._ports[0], name, seconds) if from_torchrun else None

    def of_rank_0(self) -> list[Address]:
        """Returns the addresses at which rank 0 is to try to listen, in this order."""
        if self._store is None:
            return self.find_rank_0()
        own = self._seen_by_others()
        return [Address(route_to(self._host) if own is None else own, -1)]

    def tell(self, address: Address) -> None:
        """Lets the others know where rank 0 listens."""
        if self._store is not None:
            self._store.tell(address)

    def find_rank_0(self) -> list[Address]:
        """Returns the addresses at one of which rank 0 listens, or will."""
        if self._store is not None:
            return [self._store.address(self._seconds)]
        host = self._seen_by_others() or self._host
        return [Address(host, port) for port in self._ports]

    def _seen_by_others(self) -> str | None:
        """Returns the address by which others reach rank 0's host, on that host, where its own table of hosts says that
        its name stands for itself alone; else None."""
        if is_loopback(self._host) or not is_loopback(route_to(self._host)):
            return None
        for other in other_hosts(os.environ):
            with contextlib.suppress(ApportionError):
                if not is_loopback(own := route_to(other)):
                    return own
        return route_to(ANYWHERE)

    def beside(self, sock: socket.socket, rank: int) -> Address:
        """Returns the address at which a rank is to listen that has reached rank 0 by this connection."""
        return Address(sock.getsockname()[0], -1)


@final
class GivenPlace:
    """Where the ranks of several hosts meet that a supervisor has given the address and the port."""

    has_many = False

    def __init__(self, address: Address) -> None:
        self._address = address

    def of_rank_0(self) -> list[Address]:
        """Returns the addresses at which rank 0 is to try to listen, in this order."""
        return [self._address]

    def tell(self, address: Address) -> None:
        """Does nothing: the others were given the address where rank 0 listens."""

    def find_rank_0(self) -> list[Address]:
        """Returns the addresses at one of which rank 0 listens, or will."""
        return self.of_rank_0()

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
        time.sleep(_PAUSE_SECONDS)


def where() -> str:
    """Returns what the place where ranks meet is called in messages."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR:MASTER_PORT)"


@final
class _TorchrunStore:
    """The store of torchrun's agents, in which rank 0 leaves its address."""

    def __init__(self, host: str, port: int, name: str, seconds: float) -> None:
        import torch.distributed as dist  # takes long, and only torchrun's ranks need it

        self._key = f"apportion/{name}/address"
        try:
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise ApportionError(
                f"torchrun's store at {where()} does not answer: {str(error).splitlines()[0]}"
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
            raise ApportionError(f"rank 0 has left no address in torchrun's store at {where()}: {error}") from error
