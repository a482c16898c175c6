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
from typing import NamedTuple, final

from torch import Tensor

from apportion.comm.network.rank_connection import RankConnection, memory_of

PIECE_BYTES = 256 << 10
"""The bytes of a piece."""


class _Piece(NamedTuple):
    """Some numbers of a part, and the memory that they lie in."""

    numbers: Tensor
    data: memoryview

    def begin(self, like: _Piece) -> _Piece:
        """Returns as many of these numbers as another piece has."""
        if self.data.nbytes == like.data.nbytes:
            return self
        return _Piece(self.numbers[: len(like.numbers)], self.data[: like.data.nbytes])


def _pieces(part: Tensor) -> list[_Piece]:
    """Returns the pieces of a part. Its memory is looked up once, which takes as long as to add a small piece."""
    pieces, data = part.split(PIECE_BYTES // part.element_size()), memory_of(part)
    each = pieces[0].nbytes
    return [_Piece(piece, data[at * each : (at + 1) * each]) for at, piece in enumerate(pieces)]


@final
class RingSum:
    """One sum under way. In a hop a rank receives a part from the rank before it: in the first half of the hops it adds
    its own numbers, in the second half the part is whole.

    ``after``, ``before``: the connections to the next rank and to the one before. ``memory``: where addends lie until
    they are added, as long as the longest part.
    """

    def __init__(
        self, rank: int, size: int, after: RankConnection, before: RankConnection, flat: Tensor, memory: Tensor
    ) -> None:
        self._rank, self._size, self._after, self._before = rank, size, after, before
        self._hops, self._adding = 2 * (size - 1), size - 1
        self._parts = [_pieces(part) for part in flat.tensor_split(size)]
        self._addends = _pieces(memory)
        self._expected = deque(
            (hop, piece) for hop in range(self._hops) for piece in range(len(self._parts[self._part(hop)]))
        )
        """The pieces that are still to be asked for, in the order in which they come."""
        self._asked: deque[tuple[int, int, _Piece, int]] = deque()
        for piece in self._parts[rank]:
            self._last = after.send(piece.data)
        self._ask()

    def _part(self, hop: int) -> int:
        """Returns the number of the part that comes in a hop."""
        return (self._rank - hop - 1) % self._size

    def _ask(self) -> None:
        """Asks for the next pieces, as far as there is memory for them: an addend lies there until it is added."""
        while self._expected and self._has_memory(*self._expected[0]):
            hop, piece = self._expected.popleft()
            own = self._parts[self._part(hop)][piece]
            into = self._addends[piece].begin(own) if hop < self._adding else own
            self._asked.append((hop, piece, into, self._before.receive(into.data)))

    def _has_memory(self, hop: int, piece: int) -> bool:
        """Tells whether no piece of an earlier hop lies where this one would come to."""
        if not self._asked:
            return True
        oldest, number = self._asked[0][:2]
        return hop == oldest or (hop == oldest + 1 and piece < number)

    def go_on(self) -> None:
        """Adds what has come, and sends it on."""
        while self._asked and self._before.through[1] >= self._asked[0][3]:
            hop, piece, into, _ = self._asked.popleft()
            own = self._parts[self._part(hop)][piece]
            if hop < self._adding:
                # Own numbers plus what has come: each part is summed along the ring from the rank of its number on, in
                # one order, so that the finished part has the same bits wherever it is copied.
                own.numbers.add_(into.numbers)
            # Sent only after it was added: the memory must stay as it is until the message is through. The last hop
            # brings what every other rank has already.
            if hop < self._hops - 1:
                self._last = self._after.send(own.data)
            self._ask()
            self._after.move()
            self._before.move()

    def is_through(self) -> bool:
        """Returns whether every piece has come and gone."""
        return not self._asked and not self._expected and self._after.through[0] >= self._last
