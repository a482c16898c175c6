"""The collectives of ranks on several hosts, of which some have several: memory within a host, connections across.

::

    host A   rank 0  \\ memory: a0 + a1      slice 0 of it  <->  slice 0 of b0 + b1     memory \\  rank 2   host B
             rank 1  /                      slice 1 of it  <->  slice 1 of b0 + b1            /  rank 3

The ranks of a host sum in memory; then each sends one slice of the sum across, to the rank that has that slice on the
other hosts; then all read the others' slices in memory. A host sends what it would send if it had one rank alone. Where
hosts have different numbers of ranks there are as many slices as the smallest has ranks. The order of all sums is
fixed: within a host in rank order, then in the order of the hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from apportion.comm.group import DONE, Group, WaitClock, Work, collective
from apportion.comm.host_memory import host_memory
from apportion.comm.network.collective_thread import CollectiveThread
from apportion.comm.network.host_exchange import HostsGroup, HostSum, SliceExchange
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.shared_memory_group import SharedMemoryGroup

PIECE_BYTES = 1 << 20
"""The bytes of a tensor that are on the cable at a time, at the least."""


@final
class HierarchicalGroup(HostsGroup):
    """Ranks of several hosts. ``make`` makes one."""

    beside = True

    def __init__(
        self, flat: NetworkGroup, hosts: Sequence[Sequence[int]], memory: SharedMemoryGroup | None, *, spins: bool
    ) -> None:
        self.rank, self.size, self.all_waits = flat.rank, flat.size, flat.all_waits
        self.waits: deque[tuple[float, float]] = deque(maxlen=flat.waits.maxlen)
        self.flat = flat
        """The group of the same ranks over connections alone."""
        self._hosts, self._memory, self._spins = [list(ranks) for ranks in hosts], memory, spins
        self._own_host = next(number for number, ranks in enumerate(self._hosts) if self.rank in ranks)
        own = self._hosts[self._own_host]
        self._place, self._slices = own.index(self.rank), min(map(len, self._hosts))
        # Each rank of a host makes the group of its own slice, with its peers of the other hosts.
        self._across = flat.part([ranks[self._place] for ranks in self._hosts]) if self._place < self._slices else None
        self._thread: CollectiveThread | None = None

    @classmethod
    @collective
    def make(cls, flat: NetworkGroup, hosts: Sequence[int], *, spins: bool) -> Group:
        """Makes the group of the same ranks that uses memory where ranks of a host can share some; ``flat`` itself
        where they cannot. Called by all ranks.

        ``hosts``: the host of each rank, numbered in the order in which they come. ``spins``: has every rank a core of
        its own?
        """
        ranks: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
        for rank, host in enumerate(hosts):
            ranks[host].append(rank)
        own = ranks[hosts[flat.rank]]
        memory = None
        if len(own) > 1:
            near = flat.part(own)
            memory = host_memory(near, spins=spins)
            if memory is None:
                near.close()
            else:
                memory.flat = near
        has = torch.tensor([1.0 if memory is not None or len(own) == 1 else 0.0])
        # Every rank must come to the same answer, or some would meet in memory and the others on the cable.
        flat.all_reduce(has).wait()
        if has.item() == flat.size:
            return cls(flat, ranks, memory, spins=spins)
        if memory is not None:
            memory.close()
        return flat

    # Collectives

    def all_reduce(self, tensor: Tensor) -> Work:
        flat = tensor.detach().view(-1)
        if not flat.numel():
            return DONE
        if self._thread is None:
            self._sum(flat)
            return DONE
        return self._thread.run(lambda clock: self._sum(flat), self)

    def all_reduce_between(self, tensor: Tensor, between: HostSum) -> Work:
        flat = tensor.detach().view(-1)
        if not flat.numel():
            return DONE
        if self._thread is None:
            self._sum_between(flat, between)
            return DONE
        return self._thread.run(lambda clock: self._sum_between(flat, between), self)

    def _sum(self, flat: Tensor) -> None:
        """Sums in place over the ranks."""
        if len(self._hosts) == 2 and flat.nbytes > PIECE_BYTES:
            self._sum_in_pieces(flat)
            return
        if self._memory is not None:
            self._memory.all_reduce(flat).wait()
        self._add_hosts(flat)

    def _sum_in_pieces(self, flat: Tensor) -> None:
        """Sums in place over the ranks of two hosts: while a piece is on the cable, those before and after it are
        summed and shared within each host."""
        pieces = flat.split(PIECE_BYTES // flat.element_size())
        slices = [piece.tensor_split(self._slices) for piece in pieces]
        across = None if self._across is None else self._across.pair_sum(flat)
        # All pieces are put on the cable before the first is waited for. Each has memory of its own in the pair's
        # scratch, and both hosts begin them in one order.
        for piece, of in zip(pieces, slices, strict=True):
            if self._memory is not None:
                self._memory.all_reduce(piece).wait()
            if across is not None:
                across.begin(of[self._place])
        for of in slices:
            if across is not None:
                across.finish()
            self._share(of)

    def _sum_between(self, flat: Tensor, between: HostSum) -> None:
        """Sums in place over the ranks, between hosts as ``between`` does."""
        if self._memory is not None:
            self._memory.all_reduce(flat).wait()
        between(flat, self._slice_exchange())

    def _slice_exchange(self) -> SliceExchange:
        def own(flat: Tensor) -> Tensor:
            return flat[:0] if self._across is None else flat.tensor_split(self._slices)[self._place]

        def share(flat: Tensor) -> None:
            self._share(flat.tensor_split(self._slices))

        peers = None if self._across is None else self._across.peers()
        return SliceExchange(peers, self._own_host, len(self._hosts), own, share, self._add_hosts)

    def _add_hosts(self, flat: Tensor) -> None:
        """Sums in place over the hosts what the ranks of each host have in common."""
        slices = flat.tensor_split(self._slices)
        if self._across is not None:
            self._across.add_up(slices[self._place])
        self._share(slices)

    def _share(self, slices: Sequence[Tensor]) -> None:
        """Gives every rank of this host the slices that each of them has."""
        if self._memory is None:
            return
        ranks = self._memory.size
        parts = [*slices, *(slices[0][:0] for _ in range(ranks - len(slices)))]
        self._memory.gather_parts(parts[self._place], parts)

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        self._settle()
        if not own.numel():
            return
        blocks = [own.new_empty((len(ranks), own.numel())) for ranks in self._hosts]
        mine = blocks[self._own_host]
        if self._memory is None:
            mine[0].copy_(own)
        else:
            self._memory.gather_into(mine, own)
        slices = [block.view(-1).tensor_split(self._slices) for block in blocks]
        if self._across is not None:
            parts = [of[self._place] for of in slices]
            self._across.gather_parts(parts[self._own_host], parts)
        for number, of in enumerate(slices):
            if number != self._own_host:
                self._share(of)
        for ranks, block in zip(self._hosts, blocks, strict=True):
            for rank, row in zip(ranks, block, strict=True):
                rows[rank].copy_(row)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        self._settle()
        flat = tensor.detach().view(-1)
        host = next(number for number, ranks in enumerate(self._hosts) if source in ranks)
        if host == self._own_host and self._memory is not None:
            self._memory.broadcast(flat, source=self._hosts[host].index(source))
        slices = flat.tensor_split(self._slices)
        if self._across is not None and slices[self._place].numel():
            self._across.broadcast(slices[self._place], source=host)
        if host != self._own_host:
            self._share(slices)

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        self._settle()
        if not into.numel():
            return
        sums = rows.detach().reshape(self.size, -1)
        if self._memory is not None:
            sums = self._memory.total(sums)
        blocks = [sums[ranks] for ranks in self._hosts]
        mine = blocks[self._own_host]
        slices = mine.view(-1).tensor_split(self._slices)
        if self._across is not None:
            parts = [block.view(-1).tensor_split(self._slices)[self._place] for block in blocks]
            slices[self._place].copy_(self._across.sum_parts(parts))
        self._share(slices)
        into.copy_(mine[self._place].view(into.shape))

    def barrier(self) -> None:
        self._settle()
        self._sum(torch.zeros(1))

    # Messages

    def send(self, tensor: Tensor, to: int) -> Work:
        near = self._near(to)
        return self.flat.send(tensor, to) if near is None else near[0].send(tensor, near[1])

    def receive(self, into: Tensor, source: int) -> Work:
        near = self._near(source)
        return self.flat.receive(into, source) if near is None else near[0].receive(into, near[1])

    def _near(self, rank: int) -> tuple[SharedMemoryGroup, int] | None:
        """Returns the group of this host and the rank's number there, where the rank is on this host."""
        own = self._hosts[self._own_host]
        if self._memory is None or rank == self.rank or rank not in own:
            return None
        return self._memory, own.index(rank)

    # Others

    @collective
    def lane(self) -> Group:
        flat = self.flat.lane()
        flat.all_waits = WaitClock()  # what the other thread waits for is its own
        hosts = {rank: number for number, ranks in enumerate(self._hosts) for rank in ranks}
        made = HierarchicalGroup.make(flat, [hosts[rank] for rank in range(self.size)], spins=self._spins)
        if isinstance(made, HierarchicalGroup):
            made._thread = CollectiveThread()
        made.all_waits = self.all_waits
        return made

    def interrupt(self) -> None:
        """Has those that wait in this group stop waiting, with PeerLost. May be called from any thread; only ``close``
        comes after it."""
        if self._memory is not None:
            self._memory.meeting.interrupt()
        if self._across is not None:
            self._across.interrupt()
        self.flat.interrupt()

    def close(self) -> None:
        self.interrupt()
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._across is not None:
            self._across.close()
        if self._memory is not None:
            self._memory.close()
        self.flat.close()

    def _settle(self) -> None:
        """Waits for the sums that another thread makes: they come first."""
        if self._thread is not None:
            self._thread.wait_idle(self)
