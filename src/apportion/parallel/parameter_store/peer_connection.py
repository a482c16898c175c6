"""Two processes and a gloo group of their own: what one sends, the other receives, on this host or another.

::

    server   listens: a TCPStore, and in it a queue of who wants to talk
    worker   connects, puts its name into the queue; both form a group of two, which is theirs alone

No group has more members than two, so the loss of a process ends only its own conversations.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, final

import torch
import torch.distributed
from torch import Tensor

from apportion.errors import PeerLost

CONNECT = timedelta(seconds=10)
"""For a server that lives to answer; one that is dead refuses, or breaks off, at once."""
TRY = timedelta(seconds=1)
"""Of a store to connect: it goes on trying for twice as long where the server has died since it was asked for."""
SILENCE = timedelta(days=1)
"""Between two messages: a peer that dies is noticed at once, one that is slow is not lost."""
_WORKER, _SERVER = 0, 1
_QUEUE = "asked"
_numbers = count()
_dist: Any = torch.distributed
"""Its stores and groups are not in its type declarations."""


@final
class PeerListener:
    """Where a server is to be found, and who wants to talk to it."""

    def __init__(self, host: str) -> None:
        self.host = host
        with socket.create_server((host, 0), backlog=1024) as listening:  # a store's own listens at every address
            self.port = int(listening.getsockname()[1])
            self._store = _dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=SILENCE,
                master_listen_fd=listening.detach(),
            )

    def asked(self) -> str | None:
        """Who wants to talk, as soon as someone does; None: it is closed."""
        return bytes(self._store.queue_pop(_QUEUE)).decode() or None

    def meet(self, name: str) -> PeerPair:
        """Talk to the one of that name."""
        return _pair(_client(self.host, self.port), self.host, name, _SERVER)

    def close(self) -> None:
        """Nobody is waited for any more."""
        _client(self.host, self.port).queue_push(_QUEUE, "")


def connect(host: str, port: int, seat: int) -> PeerPair:
    """Talk to the server that listens there; it learns the seat, which is what the name begins with."""
    store, name = _client(host, port), f"{seat}/{os.getpid()}/{next(_numbers)}"
    store.queue_push(_QUEUE, name)
    return _pair(store, host, name, _WORKER)


def _client(host: str, port: int) -> Any:
    end = time.monotonic() + CONNECT.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), CONNECT.total_seconds()).close()  # a dead one refuses
            store = _dist.TCPStore(host, port, is_master=False, timeout=TRY)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) or time.monotonic() > end:
                raise PeerLost(f"the parameter server at {host}:{port} does not answer") from error
        else:
            store.set_timeout(CONNECT)
            return store


def _pair(store: Any, host: str, name: str, rank: int) -> PeerPair:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = CONNECT
    try:
        group = _dist.ProcessGroupGloo(_dist.PrefixStore(name, store), rank, 2, options)
    except RuntimeError as error:
        raise PeerLost(f"{name} and the parameter server at {host} could not meet") from error
    return PeerPair(group, 1 - rank, store)


@final
class PeerPair:
    """One end. Messages arrive in the order in which they were sent."""

    def __init__(self, group: Any, peer: int, store: Any) -> None:
        group.set_timeout(SILENCE)
        self._group, self._peer = group, peer
        self._store = store  # the group lives as long as it does
        self._order = torch.zeros(2, dtype=torch.int64)

    def send(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Begin to; to be waited for."""
        return [self._start(self._group.send, tensor) for tensor in tensors if tensor.numel()]

    def receive(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The same for what comes into these."""
        return [self._start(self._group.recv, tensor) for tensor in tensors if tensor.numel()]

    def _start(self, move: Any, tensor: Tensor) -> Any:
        try:
            return move([tensor], self._peer, 0)
        except RuntimeError as error:
            raise _lost(error) from error

    def ask(self, what: int, how: int = 0) -> None:
        """A short message."""
        wait(self.send([torch.tensor([what, how])]))

    def asked(self) -> tuple[int, int]:
        """The next short message."""
        wait(self.receive([self._order]))
        what, how = self._order.tolist()
        return what, how

    def close(self) -> None:
        """The other end finds that nobody is there."""
        self._group.abort()


def wait(works: Sequence[Any]) -> None:
    """Until all have come or gone. PeerLost where the other end is dead."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"the other end of a conversation is gone: {str(error).splitlines()[0]}")
