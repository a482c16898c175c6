"""The addresses at which ranks listen: a socket of this host that only its user may reach, or one of TCP."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from apportion.errors import ApportionError

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
"""The options by which a connection finds out within a minute that the other host has vanished."""
_NEAR_SECONDS = 0.005
"""The round trip up to which another host is on the same local network."""
_CONGESTION = b"cubic", b"reno"
"""The congestion controls of a local network, the better one first. BBR, which a system may have for all connections,
paces by what it has measured and loses 5 to 15 % of a cable in the bursts of collectives."""
_SHORTEST_RTT = struct.Struct("=148xI")
"""Where Linux has the shortest round trip in microseconds in TCP_INFO."""
_NO_RTT = 0xFFFFFFFF
"""What it has there before the first one."""
_PEERCRED = struct.Struct("3i")
_MOST_WAITING = 1024


@dataclass(frozen=True)
class Address:
    """Where a rank listens. ``port`` 0: a socket of this host, whose name is ``host``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def listen(address: Address) -> tuple[socket.socket, Address]:
    """Returns a socket that listens at an address alone, and the address as others reach it. ``port`` -1 takes a free
    one. Raises OSError where it cannot be had."""
    if not address.port:
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(_unix_name(address.host, make=True))
            listening.listen(_MOST_WAITING)
        except OSError:
            listening.close()
            raise
        return listening, address
    family, _, _, _, where = _resolved(address.host, max(address.port, 0))
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_MOST_WAITING)
    except OSError:
        listening.close()
        raise
    host, port, *_ = listening.getsockname()
    return listening, Address(host, port)


def dial(address: Address, seconds: float) -> socket.socket:
    """Returns a connection to an address. Raises OSError where no process answers there."""
    if address.port:
        sock = socket.create_connection((address.host, address.port), seconds)
        prepare(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(_unix_name(address.host))
        if not is_own_user(sock):
            raise ConnectionRefusedError(f"{address.host} is another user's")
    except OSError:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket) -> None:
    """Sets what a connection of TCP needs: small messages leave at once, and a host that has vanished is found out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # each system has some of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prepare_bulk(sock: socket.socket) -> None:
    """Sets what a connection of TCP needs for messages of many bytes."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    for name in _CONGESTION if round_trip(sock) < _NEAR_SECONDS else ():
        with contextlib.suppress(OSError):  # the system does not let every user have each of them
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def round_trip(sock: socket.socket) -> float:
    """Returns the seconds of the shortest round trip of a connection; 0 within a host, and where the system does not
    tell."""
    if sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST_RTT.size)
    (microseconds,) = _SHORTEST_RTT.unpack(info.ljust(_SHORTEST_RTT.size, b"\0"))  # an old system tells less
    return 0.0 if microseconds == _NO_RTT else microseconds * 1e-6


def is_readable(sock: socket.socket, seconds: float) -> bool:
    """Waits for a connection to have something to read, or to have ended, and returns whether it has. Unlike
    select.select it takes any number of a descriptor: a rank among hundreds has more than 1,024."""
    waits = select.poll()
    waits.register(sock, select.POLLIN)
    return bool(waits.poll(seconds * 1000))


def is_own_user(sock: socket.socket) -> bool:
    """Returns whether the other end of a connection within this host is a process of the same user. Elsewhere than on
    Linux the folder of the socket sees to that."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return bool(_PEERCRED.unpack(credentials)[1] == os.geteuid())


def route_to(host: str) -> str:
    """Returns the address of this host by which it reaches another one, whose name or address is given. Raises
    ApportionError where there is none."""
    try:
        family, _, _, _, where = _resolved(host, 1)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # of a datagram socket: chooses the route, and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ApportionError(f"this host has no way to {host} ({error}): give the address of rank 0's host") from error


def is_loopback(host: str) -> bool:
    """Returns whether a host is written as what stands for this host alone, on every host."""
    return host.startswith("127.") or host in ("localhost", "::1")


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, int, int, str, tuple[str, int]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]  # type: ignore[return-value]


def _unix_name(name: str, *, make: bool = False) -> str:
    """Returns the name of a socket of this host: on Linux one that is not a file, and is gone with the process."""
    if sys.platform == "linux":
        return f"\0apportion/{os.geteuid()}/{name}"
    folder = Path(tempfile.gettempdir(), f"apportion-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o077:
        raise PermissionError(f"{folder} must be this user's alone")
    path = folder / name
    if make:
        path.unlink(missing_ok=True)
    return str(path)
