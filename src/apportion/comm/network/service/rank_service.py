"""Where rank 0 serves ranks that come and go: they prove that they know the secret, as in a meeting, but none of them
waits for any other than rank 0.

Rank 0 listens where ranks that others have started meet (``meeting_place.py``): at MASTER_ADDR:MASTER_PORT, or where
all are on one host, at a socket of it that only its user can reach.
"""

from __future__ import annotations

import os
import socket
from typing import final

from apportion.comm.network.address import is_loopback
from apportion.comm.network.dialling import Stopped, dial_first
from apportion.comm.network.handshake import Purpose, key_of_meeting
from apportion.comm.network.launched_ranks import run_name
from apportion.comm.network.meeting_place import OneHost, SeveralHosts
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.rendezvous import DEADLINE_SECONDS, secret_for


@final
class RankService:
    """The way to rank 0, and its own end of it. ``one_host`` and ``insecure`` as in a meeting."""

    def __init__(self, *, one_host: bool, insecure: bool) -> None:
        one_host = one_host or is_loopback(os.environ["MASTER_ADDR"])
        self.name = "/".join((*run_name(os.environ), "service"))
        """What connections to rank 0 are for."""
        self._place = OneHost(self.name) if one_host else SeveralHosts(self.name, DEADLINE_SECONDS)
        self._secret = key_of_meeting(secret_for(one_host=one_host, insecure=insecure), self.name)

    def listen(self) -> RankListener:
        """Listens, as rank 0, for ranks that come."""
        listener = RankListener.at_first(self._place.of_rank_0(), self._secret)
        self._place.tell(listener.address)
        return listener

    def dial(self, rank: int, seconds: float, stopped: Stopped) -> socket.socket:
        """Connects to rank 0 as this rank. Raises PeerLost where it is not there within so many seconds."""
        places = self._place.find_rank_0()
        return dial_first(places, self._secret, Purpose(self.name, rank), seconds, stopped)[0]
