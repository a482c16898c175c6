"""Where rank 0 serves ranks that come and go: they prove that they know the secret, as in a meeting, but none of them
waits for any other than rank 0.

::

    several hosts   rank 0 listens at MASTER_ADDR:MASTER_PORT, as in a meeting (``meeting_place.py``)
    one host        at a socket of this host that only its user can reach
    a group         of ranks that have met already: rank 0 listens at a place of its own, and tells them where
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any, Protocol, final

import torch

from apportion.comm.group import Group, collective
from apportion.comm.network.address import Address, is_loopback
from apportion.comm.network.dialling import Stopped, dial_first
from apportion.comm.network.handshake import Purpose, key_of_meeting
from apportion.comm.network.launched_ranks import run_name
from apportion.comm.network.meeting_place import OneHost, SeveralHosts
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.rendezvous import DEADLINE_SECONDS, secret_for
from apportion.comm.objects import broadcast_message


class ServicePlace(Protocol):
    """A place where rank 0 listens and others find it."""

    def of_rank_0(self) -> list[Address]:
        """Returns the addresses at which rank 0 is to try to listen, in this order."""

    def find_rank_0(self) -> list[Address]:
        """Returns the addresses at one of which rank 0 listens, or will."""

    def tell(self, address: Address) -> None:
        """Lets the others know where rank 0 listens."""


@final
class RankService:
    """The way to rank 0, and its own end of it. ``name``: what connections to it are for."""

    def __init__(self, name: str, secret: bytes, place: ServicePlace) -> None:
        self.name, self._secret, self._place = name, secret, place

    def listen(self) -> RankListener:
        """Listens, as rank 0, for ranks that come."""
        listener = RankListener.at_first(self._place.of_rank_0(), self._secret)
        self._place.tell(listener.address)
        return listener

    def dial(self, rank: int, seconds: float, stopped: Stopped) -> socket.socket:
        """Connects to rank 0 as this rank. Raises PeerLost where it is not there within so many seconds."""
        places = self._place.find_rank_0()
        return dial_first(places, self._secret, Purpose(self.name, rank), seconds, stopped)[0]


def service_of_run(*, one_host: bool, insecure: bool) -> RankService:
    """Returns the service of a run whose ranks have not met. ``one_host`` and ``insecure`` as in a meeting."""
    one_host = one_host or is_loopback(os.environ["MASTER_ADDR"])
    name = "/".join((*run_name(os.environ), "service"))
    place = OneHost(name) if one_host else SeveralHosts(name, DEADLINE_SECONDS)
    return RankService(name, _key(name, one_host=one_host, insecure=insecure), place)


@collective
def service_of_group(group: Group, device: torch.device, *, insecure: bool) -> tuple[RankService, RankListener | None]:
    """Returns a service among ranks that have met, and on rank 0 what listens there. Called by all ranks."""
    flat: Any = getattr(group, "flat", None) or group
    host: str | None = getattr(flat, "host_of_rank_0", None)
    told: tuple[str, int] = secrets.token_hex(16), 0
    listener = None
    if group.rank == 0:
        listener = _told_service(told[0], host, -1, insecure).listen()
        told = told[0], listener.address.port
    name, port = broadcast_message(told, group, device=device)
    return _told_service(name, host, port, insecure), listener


def _told_service(name: str, host: str | None, port: int, insecure: bool) -> RankService:
    """Returns the service at a place that rank 0 tells; ``host``: None where the ranks are on one host."""
    place = OneHost(name) if host is None else _ToldPlace(Address(host, port))
    return RankService(name, _key(name, one_host=host is None, insecure=insecure), place)


def _key(name: str, *, one_host: bool, insecure: bool) -> bytes:
    """Returns what ranks prove to know; on one host its sockets are their user's alone."""
    return key_of_meeting(secret_for(one_host=one_host, insecure=insecure), name)


@final
class _ToldPlace:
    """A place that rank 0 tells the others by another way."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def of_rank_0(self) -> list[Address]:
        return [self._address]

    def find_rank_0(self) -> list[Address]:
        return [self._address]

    def tell(self, address: Address) -> None:
        pass
