"""The sum of a large tensor over ranks in a ring: each sends to the next one alone, and receives from the one before.

::

    rank 0   part 0 -> 1      part 2 + own -> 1     ...     of P ranks P - 1 hops add, and P - 1 more hand round
    rank 1   part 1 -> 2      part 0 + own -> 2     ...     what is whole

Parts go in pieces: what has come is added and goes on while the rest still comes, so that a hop costs the time of a
piece and not of a part. Each rank sends ``2 (P - 1) / P`` of the tensor (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009). A part is summed in rank order from its own rank on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from apportion.comm.group import WaitClock, bytes_of
from apportion.comm.network.rank_connection import RankConnection

PIECE_BYTES = 128 << 10
"""The bytes of a piece."""


class RingGroup(Protocol):
    """What a ring needs of its ranks' group."""

    rank: int
    size: int

    def peer(self, at: int, clock: WaitClock) -> RankConnection:
        """Returns the connection to a rank."""

    def move(
        self,
        peers: Sequence[RankConnection],
        holds: Callable[[], bool],
        clock: WaitClock,
        moved: Callable[[], None] | None = None,
    ) -> None:
        """Moves messages until a condition holds."""

    def scratch(self, like: Tensor, times: int = 1) -> Tensor:
        """Returns memory for so many tensors like this one."""


def sum_in_ring(group: RingGroup, flat: Tensor, clock: WaitClock) -> None:
    """Sums a flat tensor in place over the ranks of a group."""
    ring = _RingSum(group, flat, clock)
    group.move([ring.after, ring.before], ring.is_through, clock, ring.go_on)


class _RingSum:
    """One sum under way. In a hop a rank receives a part from the rank before it: in the first half of the hops it adds
    its own numbers, in the second half the part is whole."""

    def __init__(self, group: RingGroup, flat: Tensor, clock: WaitClock) -> None:
        self._rank, self._size = group.rank, group.size
        self._hops, self._adding = 2 * (group.size - 1), group.size - 1
        self.after = group.peer((self._rank + 1) % self._size, clock)
        self.before = group.peer((self._rank - 1) % self._size, clock)
        numbers = PIECE_BYTES // flat.element_size()
        parts = flat.tensor_split(self._size)
        self._parts = [part.split(numbers) for part in parts]
        self._addends = group.scratch(max(parts, key=len)).split(numbers)
        self._expected = deque(
            (hop, piece) for hop in range(self._hops) for piece in range(len(self._parts[self._part(hop)]))
        )
        """The pieces that are still to be asked for, in the order in which they come."""
        self._asked: deque[tuple[int, int, Tensor, int]] = deque()
        self.after.begin_count()
        self.before.begin_count()
        for piece in self._parts[self._rank]:
            self._last = self.after.send(memory_of(piece))
        self._ask()

    def _part(self, hop: int) -> int:
        """Returns the number of the part that comes in a hop."""
        return (self._rank - hop - 1) % self._size

    def _ask(self) -> None:
        """Asks for the next pieces, as far as there is memory for them: an addend lies there until it is added."""
        while self._expected and self._has_memory(*self._expected[0]):
            hop, piece = self._expected.popleft()
            own: Tensor = self._parts[self._part(hop)][piece]
            into = self._addends[piece][: own.numel()] if hop < self._adding else own
            self._asked.append((hop, piece, into, self.before.receive(memory_of(into))))

    def _has_memory(self, hop: int, piece: int) -> bool:
        """Tells whether no piece of an earlier hop lies where this one would come to."""
        if not self._asked:
            return True
        oldest, number = self._asked[0][:2]
        return hop == oldest or (hop == oldest + 1 and piece < number)

    def go_on(self) -> None:
        """Adds what has come, and sends it on."""
        while self._asked and self.before.through[1] >= self._asked[0][3]:
            hop, piece, into, _ = self._asked.popleft()
            own = self._parts[self._part(hop)][piece]
            if hop < self._adding:
                own.add_(into)
            if hop < self._hops - 1:
                self._last = self.after.send(memory_of(own))
            self._ask()
            self.after.move()
            self.before.move()

    def is_through(self) -> bool:
        """Returns whether every piece has come and gone."""
        return not self._asked and not self._expected and self.after.through[0] >= self._last


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    numbers: Any = bytes_of(tensor).numpy()
    return memoryview(numbers)
