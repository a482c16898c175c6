"""What a rank exchanges with one rank of every other host: a whole tensor, or the slice that it has on its host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, final

from torch import Tensor

from apportion.comm.group import Group, WaitClock, Work
from apportion.comm.network.rank_connection import RankConnection, memory_of

Messages = Sequence[tuple[int, memoryview]]
"""The memory that goes to, or comes from, each of some peers."""


class HostExchange(ABC):
    """What one rank does of the sum of a tensor between hosts, once the ranks of each host have summed it: they all
    have their host's sum, and each exchanges one slice of it with its peers, one rank of every host."""

    host: int
    """The number of this rank's host."""
    hosts: int

    @abstractmethod
    def own(self, flat: Tensor) -> Tensor:
        """Return the slice of a tensor that this rank exchanges, a view: the same on its peers, empty where a host has
        more ranks than there are slices."""

    def gather(self, rows: Tensor) -> None:
        """Gather the peers' rows into ``rows`` (hosts, n): this rank's own is in its place already. Blocks."""
        self.begin_gather(rows)()

    @abstractmethod
    def begin_gather(self, rows: Tensor) -> Callable[[], None]:
        """Begin what ``gather`` does, and return what waits for its end. Several may be under way: they are waited for
        in the order in which they were begun, before anything else is exchanged."""

    @abstractmethod
    def swap(self, rows: Tensor, into: Tensor) -> None:
        """Send row h of ``rows`` (hosts, n) to the peer on host h, for every other host, and receive that one's row
        into ``into[h]``. Blocks."""

    @abstractmethod
    def share(self, flat: Tensor) -> None:
        """Give every rank of this host the slices of a tensor that the others have. Blocks."""

    @abstractmethod
    def add_up(self, flat: Tensor) -> None:
        """Sum in place over the hosts a tensor that is equal on the ranks of each host. Blocks."""


def _nothing() -> None:
    """Waits for nothing, where nothing was begun."""


class HostSum(ABC):
    """A way to sum one tensor between hosts, again and again, which may send less than its bytes."""

    same_on_host: ClassVar[bool] = False
    """Do all ranks of a host keep the same? False: each keeps what belongs to its slice."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is kept for the next sum, by name: the tensors themselves, of which each has one dimension."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 (nothing is kept)
        """Go on from what another sum of the same tensor has kept; from nothing where that is empty. Raises ValueError
        where it cannot be that."""

    @abstractmethod
    def __call__(self, flat: Tensor, hosts: HostExchange) -> None:
        """Sum in place over the hosts what the ranks of each host have summed: the result has the same bits on all
        ranks. It is called in another thread than the one that computes."""


class HostsGroup(Group):
    """A group of ranks of several hosts that can be given a way to sum between them."""

    @abstractmethod
    def all_reduce_between(self, tensor: Tensor, between: HostSum) -> Work:
        """Sum in place as ``all_reduce`` does, but between hosts by ``between``. It waits for nothing: what begins
        meanwhile waits for it."""


@final
class PeerExchange(HostExchange):
    """The exchange of ranks that are joined by connections, each of them for a host. ``begin`` begins to send and to
    receive at once, and returns what waits for the end; ``add`` sums in place over the ranks."""

    def __init__(
        self,
        host: int,
        hosts: int,
        begin: Callable[[Messages, Messages], Callable[[], None]],
        add: Callable[[Tensor], None],
    ) -> None:
        self.host, self.hosts, self._begin, self._add = host, hosts, begin, add
        self._others = [other for other in range(hosts) if other != host]

    def own(self, flat: Tensor) -> Tensor:
        return flat

    def begin_gather(self, rows: Tensor) -> Callable[[], None]:
        data = memory_of(rows[self.host])
        if not data.nbytes:
            return _nothing
        return self._begin([(at, data) for at in self._others], [(at, memory_of(rows[at])) for at in self._others])

    def swap(self, rows: Tensor, into: Tensor) -> None:
        if rows[self.host].numel():
            sends, receives = ([(at, memory_of(of[at])) for at in self._others] for of in (rows, into))
            self._begin(sends, receives)()

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

    def begin_gather(self, rows: Tensor) -> Callable[[], None]:
        return _nothing if self._peers is None else self._peers.begin_gather(rows)

    def swap(self, rows: Tensor, into: Tensor) -> None:
        if self._peers is not None:
            self._peers.swap(rows, into)

    def share(self, flat: Tensor) -> None:
        self._share(flat)

    def add_up(self, flat: Tensor) -> None:
        if flat.numel():
            self._add_hosts(flat)


@final
class PairSum:
    """The sum of a tensor over two ranks, piece by piece: each is on its way while those before it are used. Both ranks
    begin the same pieces in the same order."""

    def __init__(
        self, peer: RankConnection, clock: WaitClock, scratch: Tensor, move: Callable[[Callable[[], bool]], None]
    ) -> None:
        """Take the connection to the other rank, the clock of the thread that waits, and memory for what comes: as much
        as all pieces together. ``move`` moves the messages of the connection until a condition holds."""
        self._peer, self._clock, self._scratch, self._move = peer, clock, scratch, move
        self._under_way: deque[tuple[Tensor, Tensor, int, int]] = deque()
        self._begun = 0
        peer.begin_count()

    def begin(self, piece: Tensor) -> None:
        """Send a piece, and ask for the other rank's; it is theirs until ``finish``. It goes on while this thread waits
        for something else."""
        theirs = self._scratch[self._begun : self._begun + piece.numel()]
        self._begun += piece.numel()
        if not piece.numel():
            self._under_way.append((piece, theirs, 0, 0))
            return
        sent, got = self._peer.exchange(memory_of(piece), memory_of(theirs))
        self._under_way.append((piece, theirs, sent, got))
        self._peer.move()
        self._clock.moving[id(self._peer)] = self._peer.move_aside

    def finish(self) -> None:
        """Add the other rank's part to the oldest piece under way, once it has come and this one's has gone. Blocks."""
        piece, theirs, sent, got = self._under_way.popleft()
        through = self._peer.through
        if through[0] < sent or through[1] < got:
            self._move(lambda: through[0] >= sent and through[1] >= got)
        if not self._peer.events:
            self._clock.moving.pop(id(self._peer), None)
        piece.add_(theirs)
