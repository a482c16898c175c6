"""Which network interface gloo talks over."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from apportion.errors import ApportionError

_SIOCGIFADDR = 0x8915


def choose_interface(master: str) -> None:
    """Point gloo at the network interface that reaches MASTER_ADDR, unless the user has chosen one.

    gloo's own choice is whatever address the host's name resolves to: often a loopback one, which no other host can
    reach, or none at all.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ApportionError(
            f"MASTER_ADDR={master} cannot be resolved ({error}): give the address of rank 0's host"
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # a datagram socket: chooses the route, sends nothing
        except OSError:
            return
        own = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if _address(name) == own:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
