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
"""The time to connect to a server that is alive; a dead one refuses the connection, or breaks it off, at once."""
TRY = timedelta(seconds=1)
"""The timeout of a TCPStore's connection: it goes on trying for twice as long where the server has died since it was
asked for."""
SILENCE = timedelta(days=1)
"""The longest time between two messages: a peer that dies is noticed at once, one that is slow is not taken for
lost."""
_WORKER, _SERVER = 0, 1
_QUEUE = "asked"
_numbers = count()
_dist: Any = torch.distributed
"""The module torch.distributed as ``Any``: its stores and groups are not in its type declarations."""


@final
class PeerListener:
    """The address of a server, and its queue of workers that want to talk to it."""

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
        """Return the name of a worker that wants to talk, as soon as there is one; None: the listener is closed."""
        return bytes(self._store.queue_pop(_QUEUE)).decode() or None

    def meet(self, name: str) -> PeerPair:
        """Form a pair with the worker of that name."""
        return _pair(_client(self.host, self.port), self.host, name, _SERVER)

    def close(self) -> None:
        """Stop waiting for workers: ``asked`` returns None."""
        _client(self.host, self.port).queue_push(_QUEUE, "")


def connect(host: str, port: int, seat: int) -> PeerPair:
    """Connect to the server that listens there; it learns the seat, which is what the connection's name begins with."""
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
    """One end of a connection of two processes. Messages arrive in the order in which they were sent."""

    def __init__(self, group: Any, peer: int, store: Any) -> None:
        group.set_timeout(SILENCE)
        self._group, self._peer = group, peer
        self._store = store  # the group lives as long as it does
        self._order = torch.zeros(2, dtype=torch.int64)

    def send(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Begin to send these tensors; returns the operations to ``wait`` for."""
        return [self._start(self._group.send, tensor) for tensor in tensors if tensor.numel()]

    def receive(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Begin to receive into these tensors; returns the operations to ``wait`` for."""
        return [self._start(self._group.recv, tensor) for tensor in tensors if tensor.numel()]

    def _start(self, move: Any, tensor: Tensor) -> Any:
        try:
            return move([tensor], self._peer, 0)
        except RuntimeError as error:
            raise _lost(error) from error

    def ask(self, what: int, how: int = 0) -> None:
        """Send a short message of two numbers."""
        wait(self.send([torch.tensor([what, how])]))

    def asked(self) -> tuple[int, int]:
        """Wait for the next short message, and return its two numbers."""
        wait(self.receive([self._order]))
        what, how = self._order.tolist()
        return what, how

    def close(self) -> None:
        """Abort the group: the other end finds this one gone."""
        self._group.abort()


def wait(works: Sequence[Any]) -> None:
    """Wait until these operations are complete. PeerLost where the other end is dead."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"the other end of a conversation is gone: {str(error).splitlines()[0]}")
