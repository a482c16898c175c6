"""What a rank exchanges with one rank of every other host: a whole tensor, or the slice that it has on its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from apportion.comm.group import HostExchange
from apportion.comm.network.rank_connection import memory_of

Messages = Sequence[tuple[int, memoryview]]
"""The memory that goes to, or comes from, each of some peers."""


@final
class PeerExchange(HostExchange):
    """The exchange of ranks that are joined by connections, each of them for a host. ``exchange`` sends and receives at
    once, ``add`` sums in place over the ranks."""

    def __init__(
        self, host: int, hosts: int, exchange: Callable[[Messages, Messages], None], add: Callable[[Tensor], None]
    ) -> None:
        self.host, self.hosts, self._exchange, self._add = host, hosts, exchange, add
        self._others = [other for other in range(hosts) if other != host]

    def own(self, flat: Tensor) -> Tensor:
        return flat

    def gather(self, rows: Tensor) -> None:
        data = memory_of(rows[self.host])
        if data.nbytes:
            self._exchange([(at, data) for at in self._others], [(at, memory_of(rows[at])) for at in self._others])

    def swap(self, rows: Tensor, into: Tensor) -> None:
        if rows[self.host].numel():
            sends, receives = ([(at, memory_of(of[at])) for at in self._others] for of in (rows, into))
            self._exchange(sends, receives)

    def share(self, flat: Tensor) -> None:
        pass

    def add_up(self, flat: Tensor) -> None:
        if flat.numel():
            self._add(flat)


@final
class SliceExchange(HostExchange):
    """The exchange of hosts of several ranks, each of which has a slice. ``peers``: the exchange of this rank's slice;
    None where it has none. ``own`` gives the slice, ``share`` gives the ranks of this host all slices, and
    ``add_hosts`` sums in place over the hosts."""

    def __init__(
        self,
        peers: PeerExchange | None,
        host: int,
        hosts: int,
        own: Callable[[Tensor], Tensor],
        share: Callable[[Tensor], None],
        add_hosts: Callable[[Tensor], None],
    ) -> None:
        self.host, self.hosts, self._peers = host, hosts, peers
        self._own, self._share, self._add_hosts = own, share, add_hosts

    def own(self, flat: Tensor) -> Tensor:
        return self._own(flat)

    def gather(self, rows: Tensor) -> None:
        if self._peers is not None:
            self._peers.gather(rows)

    def swap(self, rows: Tensor, into: Tensor) -> None:
        if self._peers is not None:
            self._peers.swap(rows, into)

    def share(self, flat: Tensor) -> None:
        self._share(flat)

    def add_up(self, flat: Tensor) -> None:
        if flat.numel():
            self._add_hosts(flat)
