"""The collectives of ranks that are joined by connections alone.

Small tensors are exchanged directly, in one round or two. Large ones that more than two ranks sum go round in a ring
(``ring.py``), which keeps each cable busy with one message each way. Two ranks send each other the whole tensor, which
is as much as a ring of two sends, in one round. The order of every sum is fixed, so it has the same bits on every rank
and in every run: rank order, and in a ring rank order from the part's own rank on.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from apportion.comm.group import DONE, Group, WaitClock, Work, bytes_of, collective
from apportion.comm.network.collective_thread import CollectiveThread
from apportion.comm.network.host_exchange import HostsGroup, HostSum, Messages, PairSum, PeerExchange
from apportion.comm.network.rank_connection import NAP_SECONDS, RankConnection, memory_of, move_until
from apportion.comm.network.rendezvous import Meeting, RankDoors
from apportion.comm.network.ring import RingSum

DEADLINE_SECONDS = 300.0
"""The seconds without a byte after which a collective or a message is given up."""
PIECE_BYTES = 1 << 20
"""The bytes that two ranks add up at a time, while more are under way."""
RING_BYTES = 64 << 10
"""The bytes of a rank's part of a tensor from which on it goes round in a ring."""
SMALL_BYTES = 32 << 10
"""The bytes up to which every rank sends every other one its whole tensor: one round instead of two."""
INLINE_BYTES = 64 << 10
"""The bytes up to which a sum is made by the thread that asks for it."""
_RECORDED_WAITS = 8192


@final
class NetworkGroup(HostsGroup):
    """Some ranks of a meeting, in this order, who exchange over connections of their own."""

    beside = True

    def __init__(
        self, meeting: Meeting, ranks: Sequence[int], name: str = "world", *, all_waits: WaitClock | None = None
    ) -> None:
        self._meeting, self._ranks, self._name = meeting, list(ranks), name
        self.rank, self.size = self._ranks.index(meeting.rank), len(ranks)
        self.waits: deque[tuple[float, float]] = deque(maxlen=_RECORDED_WAITS)
        self.all_waits = WaitClock() if all_waits is None else all_waits
        self._peers: dict[int, RankConnection] = {}
        self._ways: dict[tuple[int, bool], RankConnection] = {}
        """The connections of messages: of each peer one that this rank sends on, and one that it receives on."""
        self._thread: CollectiveThread | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._interrupted = self._abandoned = False
        self._made: list[weakref.ReferenceType[Group]] = []
        """The groups that were made through this one."""
        self._named: Counter[str] = Counter()
        self._opened: list[weakref.ReferenceType[RankDoors]] = []

    # Collectives

    def all_reduce(self, tensor: Tensor) -> Work:
        flat = tensor.detach().view(-1)
        if not flat.numel() or self.size == 1:
            return DONE
        if flat.nbytes <= INLINE_BYTES and (self._thread is None or self._thread.is_idle()):
            self._sum(flat, self.all_waits)
            return DONE
        if self._thread is None:
            self._thread = CollectiveThread()
        return self._thread.run(lambda clock: self._sum(flat, clock), self)

    def all_reduce_between(self, tensor: Tensor, between: HostSum) -> Work:
        flat = tensor.detach().view(-1)
        if not flat.numel() or self.size == 1:
            return DONE
        if self._thread is None:
            self._thread = CollectiveThread()
        return self._thread.run(lambda clock: between(flat, self.peers(clock)), self)

    def peers(self, clock: WaitClock | None = None) -> PeerExchange:
        """Returns the exchange of this rank with the others, each of which is a host's only rank, or the one that has
        its slice."""
        clock = self.all_waits if clock is None else clock
        return PeerExchange(
            self.rank,
            self.size,
            lambda sends, receives: self._begin_exchange(sends, receives, clock),
            lambda flat: self._sum(flat, clock),
        )

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        self._settle()
        data = memory_of(own)
        if data.nbytes:
            others = self._all_others()
            self._exchange([(at, data) for at in others], [(at, memory_of(rows[at])) for at in others])
        rows[self.rank].copy_(own)

    def add_up(self, tensor: Tensor) -> None:
        """Sums in place over the ranks as ``all_reduce`` does, in the thread that asks for it. Blocks."""
        self._settle()
        flat = tensor.detach().view(-1)
        if flat.numel() and self.size > 1:
            self._sum(flat, self.all_waits)

    def pair_sum(self, most: Tensor) -> PairSum:
        """Begins a sum over the two ranks of this group, of pieces that are no more than ``most`` together."""
        self._settle()
        clock, scratch = self.all_waits, self._take_scratch(most)
        peer = self._peer(1 - self.rank, clock)
        return PairSum(peer, clock, scratch, lambda holds: self._move([peer], holds, clock))

    def gather_parts(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        self._settle()
        others = self._all_others()
        data = memory_of(own)
        sends = [(at, data) for at in others] if data.nbytes else []
        self._exchange(sends, [(at, memory_of(parts[at])) for at in others if parts[at].numel()])
        if own.numel() and parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].view(-1).copy_(own.view(-1))

    def sum_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum over the ranks of their parts of this rank's number. The parts of a number are flat and have
        one size on every rank; those of different numbers need not. Blocks."""
        self._settle()
        return self._scattered(parts, self.all_waits) if self.size > 1 else parts[0].clone()

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        self._settle()
        flat = bytes_of(tensor)
        if not flat.numel() or self.size == 1:
            return
        if self.size == 2 or flat.numel() <= SMALL_BYTES:
            self._spread(flat, source)
            return
        # The source hands a part to each rank, and all hand their parts on: no way carries more than twice the tensor.
        parts = [memory_of(part) for part in flat.tensor_split(self.size)]
        others = [at for at in self._all_others() if at != source]
        if self.rank == source:
            self._exchange([*((at, parts[at]) for at in others), *((at, parts[source]) for at in others)], [])
            return
        self._exchange([], [(source, parts[self.rank])])
        received = [*((at, parts[at]) for at in others), (source, parts[source])]
        self._exchange([(at, parts[self.rank]) for at in others], received)

    def _spread(self, flat: Tensor, source: int) -> None:
        if self.rank == source:
            self._exchange([(at, memory_of(flat)) for at in self._all_others()], [])
        else:
            self._exchange([], [(source, memory_of(flat))])

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        self._settle()
        rows = rows.contiguous()
        if not into.numel() or self.size == 1:
            into.copy_(rows[0])
            return
        into.copy_(self._scattered([row.view(-1) for row in rows], self.all_waits).view(into.shape))

    def barrier(self) -> None:
        self._settle()
        if self.size > 1:
            self._sum(torch.zeros(1), self.all_waits)

    def _sum(self, flat: Tensor, clock: WaitClock) -> None:
        """Sums in place over the ranks, of which there are several."""
        if self.size == 2:
            self._add_other(flat, clock)
        elif flat.nbytes <= SMALL_BYTES:
            flat.copy_(self._scattered([flat] * self.size, clock))
        elif flat.nbytes >= self.size * RING_BYTES:
            self._add_in_ring(flat, clock)
        else:
            parts = flat.tensor_split(self.size)
            parts[self.rank].copy_(self._scattered(parts, clock))
            others = self._all_others()
            data = memory_of(parts[self.rank])
            self._exchange([(at, data) for at in others], [(at, memory_of(parts[at])) for at in others], clock=clock)

    def _add_in_ring(self, flat: Tensor, clock: WaitClock) -> None:
        after, before = (self._peer((self.rank + way) % self.size, clock) for way in (1, -1))
        longest = max(flat.tensor_split(self.size), key=len)
        for peer in (after, before):
            peer.begin_count()
        ring = RingSum(self.rank, self.size, after, before, flat, self._take_scratch(longest))
        self._move([after, before], ring.is_through, clock, ring.go_on)

    def _add_other(self, flat: Tensor, clock: WaitClock) -> None:
        """Exchanges the whole tensor with the one other rank, and adds the pieces as they have come and gone."""
        peer = self._peer(1 - self.rank, clock)
        theirs = self._take_scratch(flat)
        peer.begin_count()
        step, added = PIECE_BYTES // flat.element_size(), 0
        sent, got = peer.exchange(memory_of(flat), memory_of(theirs))

        def add() -> None:
            nonlocal added
            # A piece may be changed only when its old numbers have gone out as well: the other rank adds those, and the
            # tensor is both what is sent and where the sum goes. a + b has the bits of b + a, so both ranks agree.
            there = min(peer.sent, peer.received) // flat.element_size()
            while added < flat.numel() and there >= min(added + step, flat.numel()):
                flat[added : added + step].add_(theirs[added : added + step])
                added += step

        self._move([peer], lambda: peer.through[0] >= sent and peer.through[1] >= got, clock, add)

    def _scattered(self, parts: Sequence[Tensor], clock: WaitClock) -> Tensor:
        """Returns the sum over the ranks of their parts of this rank's number. What is sent stays as it is."""
        others, mine = self._all_others(), parts[self.rank]
        rows = self._take_scratch(mine, len(others)).view(len(others), mine.numel())
        self._exchange(
            [(at, memory_of(parts[at])) for at in others],
            [(at, memory_of(row)) for at, row in zip(others, rows, strict=True)],
            clock=clock,
        )
        terms = [*rows[: self.rank], mine, *rows[self.rank :]]  # in rank order
        total = torch.add(terms[0], terms[1])
        for term in terms[2:]:
            total.add_(term)
        return total

    # Messages

    def send(self, tensor: Tensor, to: int) -> Work:
        assert tensor.is_contiguous(), "what is sent is contiguous"
        way = self._way(self._other(to), out=True)
        if not tensor.numel():
            return DONE
        number = way.send(memory_of(tensor))
        if not way.move():
            return DONE
        self.all_waits.moving[id(way)] = way.move_aside
        return _Message(self, way, 0, number)

    def receive(self, into: Tensor, source: int) -> Work:
        assert into.is_contiguous(), "what is received into is contiguous"
        way = self._way(self._other(source), out=False)
        if not into.numel():
            return DONE
        number = way.receive(memory_of(into))
        self.all_waits.moving[id(way)] = way.move_aside
        return _Message(self, way, 1, number)

    def _way(self, peer: int, *, out: bool) -> RankConnection:
        """Returns the connection of the messages to a rank, or from it: the sender dials, since the other end may
        not have asked for a message yet."""
        if (peer, out) not in self._ways:
            name = f"{self._name}/messages"
            rank = self._ranks[peer]
            self._ways[peer, out] = self._connect(rank, name, self.all_waits, dials=out)
        return self._ways[peer, out]

    # Others

    def part(self, ranks: Sequence[int]) -> NetworkGroup:
        """Makes the group of some of these ranks, in this order; called by them alone."""
        own = [self._ranks[rank] for rank in ranks]
        made = NetworkGroup(self._meeting, own, self._another(own), all_waits=self.all_waits)
        self.keep(made)
        return made

    def _another(self, ranks: Sequence[int]) -> str:
        """Returns a name for a part of this group: the same on each of its ranks, and another one each time. What was
        made of other groups does not count: ranks that failed while they made some of those still find each other."""
        name = ",".join(map(str, ranks))
        self._named[name] += 1
        return f"{self._name}/{name}/{self._named[name]}"

    def lane(self) -> NetworkGroup:
        return self.part(range(self.size))

    def interrupt(self) -> None:
        """Has those that wait in this group stop waiting, with PeerLost. May be called from any thread; only ``close``
        comes after it."""
        self._interrupted = True
        self._meeting.wake()
        for connection in (*self._peers.values(), *self._ways.values()):
            connection.close()

    def keep(self, group: Group) -> None:
        self._made = [*(made for made in self._made if made() is not None), weakref.ref(group)]
        if self._abandoned:
            group.abandon()

    def abandon(self) -> None:
        self._abandoned = True
        self.interrupt()
        for found in self._made:
            group = found()
            if group is not None:
                group.abandon()
        for opened in self._opened:
            doors = opened()
            if doors is not None:
                doors.abandon()

    @collective
    def links(self) -> list[socket.socket]:
        """Returns connections beside those of the group, which the caller closes: rank 0 gets one to each other rank,
        in rank order, and each of these gets one to rank 0. Called by all ranks. Raises PeerLost where a rank is not
        there."""
        name = f"{self._another(self._ranks)}/links"
        if self.rank:
            found = [self._meeting.dial(self._ranks[0], name, lambda: self._interrupted)]
        else:
            found = [self._meeting.take(rank, name, lambda: self._interrupted) for rank in self._ranks[1:]]
        for sock in found:
            sock.settimeout(None)
        return found

    @collective
    def doors(self) -> RankDoors:
        """Returns the way to the ranks of this group for conversations of two, which go on when another rank is lost.
        The ranks are numbered as in the meeting: this is the group of all of them. Called by all ranks."""
        made = self._meeting.doors(f"{self._another(self._ranks)}/doors")
        self._opened = [*(door for door in self._opened if door() is not None), weakref.ref(made)]
        return made

    def describe(self, rank: int) -> str:
        """Returns what a rank is called in messages of errors."""
        return self._meeting.describe(self._ranks[rank])

    def close(self) -> None:
        self.interrupt()
        for connection in self._ways.values():
            self.all_waits.moving.pop(id(connection), None)
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        for connection in (*self._peers.values(), *self._ways.values()):
            connection.release()
        self._peers.clear()
        self._ways.clear()
        if self._name == "world":
            self._meeting.close()

    def _all_others(self) -> list[int]:
        return [at for at in range(self.size) if at != self.rank]

    def _peer(self, at: int, clock: WaitClock) -> RankConnection:
        """Returns the connection of the collectives to a rank; the higher rank dials."""
        if at not in self._peers:
            rank = self._ranks[at]
            # One end dials and the other takes, by rank: if both dialled there would be two connections for one.
            self._peers[at] = self._connect(rank, self._name, clock, dials=rank < self._meeting.rank)
        return self._peers[at]

    def _connect(self, rank: int, name: str, clock: WaitClock, *, dials: bool) -> RankConnection:
        way = self._meeting.dial if dials else self._meeting.take
        sock, end = None, time.monotonic() + DEADLINE_SECONDS
        # Whom this rank waits for may wait for a message that only this rank moves on.
        while not dials and sock is None and clock.move_on() and not self._interrupted and time.monotonic() < end:
            sock = self._meeting.poll(rank, name, NAP_SECONDS)
        sock = sock or way(rank, name, lambda: self._interrupted)
        connection = RankConnection(sock, self._meeting.describe(rank))
        if self._interrupted:  # meanwhile
            connection.close()
        return connection

    def _exchange(self, sends: Messages, receives: Messages, *, clock: WaitClock | None = None) -> None:
        """Sends to and receives from other ranks at once, until all of it is through."""
        self._begin_exchange(sends, receives, self.all_waits if clock is None else clock)()

    def _begin_exchange(self, sends: Messages, receives: Messages, clock: WaitClock) -> Callable[[], None]:
        """Begins to send to and to receive from other ranks, and returns what waits until all of it is through."""
        peers = {at: self._peer(at, clock) for at in sorted({at for at, _ in (*sends, *receives)})}
        if [at for at, _ in sends] == [at for at, _ in receives] == [*peers]:  # one message each way
            # Ranks begin their messages in the order of the peers, and a connection carries at most one of each way
            # here.
            both = [
                (peers[at], *peers[at].exchange(data, into))
                for (at, data), (_, into) in zip(sends, receives, strict=True)
            ]
            ends = [(peer, way, number) for peer, *numbers in both for way, number in enumerate(numbers)]
        else:
            ends = [(peers[at], 0, peers[at].send(data)) for at, data in sends]
            ends += [(peers[at], 1, peers[at].receive(into)) for at, into in receives]
        try:
            for peer in peers.values():
                peer.begin_count()
                peer.move_aside()
        except BaseException:
            self._close_peers()
            raise

        def finish() -> None:
            self._move([*peers.values()], lambda: all(peer.through[way] >= number for peer, way, number in ends), clock)

        return finish

    def _move(
        self,
        peers: Sequence[RankConnection],
        holds: Callable[[], bool],
        clock: WaitClock,
        moved: Callable[[], None] | None = None,
    ) -> None:
        """Moves messages until a condition holds, as ``move_until`` does."""
        try:
            span = move_until(peers, holds, clock=clock, seconds=DEADLINE_SECONDS, moved=moved)
        except BaseException:
            self._close_peers()
            raise
        # The waits of the thread of the collectives are no waits of the step, which goes on computing meanwhile.
        if clock is self.all_waits:
            self.waits.append(span)

    def _close_peers(self) -> None:
        """Closes the connections after a failure: what others wait for will not come, and they learn it at once and not
        at their deadline."""
        for connection in self._peers.values():
            connection.close()

    def _settle(self) -> None:
        """Waits for the sums that another thread makes: they come first."""
        if self._thread is not None:
            self._thread.wait_idle(self)

    def _take_scratch(self, like: Tensor, times: int = 1) -> Tensor:
        """Returns memory for this many tensors like this one, which is another's after the next collective."""
        nbytes = like.nbytes * times
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(like.dtype)


@final
class _Message(Work):
    """A message that is under way."""

    def __init__(self, group: NetworkGroup, way: RankConnection, direction: int, number: int) -> None:
        self._group, self._way, self._direction, self._number = group, way, direction, number

    def wait(self) -> None:
        way, clock = self._way, self._group.all_waits
        if way.through[self._direction] < self._number:
            move_until(
                [way],
                lambda: way.through[self._direction] >= self._number,
                clock=clock,
                seconds=DEADLINE_SECONDS,
            )
        if not way.events:
            clock.moving.pop(id(way), None)
