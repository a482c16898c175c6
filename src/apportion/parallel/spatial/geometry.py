"""The rows of an image that each rank has, and those that it needs: exact whole-number arithmetic, nothing else.

An image of ``length`` rows lies on the ranks in strips, one after the other: ``bounds`` has a number more than there
are ranks, and rank r has the rows bounds[r] to bounds[r + 1] - 1. Rows are those of any dimension that is cut.

::

    bounds (0, 3, 6)             a 3x3 kernel, stride 1, padding 1
    rank 0   0 1 2               output row o reads the rows o - 1, o, o + 1
    rank 1         3 4 5         rank 0 makes 0 1 2, and reads -1 0 1 2 3: -1 is padding, 3 lies on rank 1

Negative rows, and those from ``length`` on, are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from apportion.core.sampler import DataShard

Bounds = tuple[int, ...]
_CACHED_PLANS = 4096


def equal(length: int, ranks: int) -> Bounds:
    """Strips that differ by one row at most, the longer ones first."""
    return (0, *(DataShard(rank, ranks).rows(length).stop for rank in range(ranks)))


def sizes(bounds: Bounds) -> list[int]:
    """The number of rows of each rank."""
    return [stop - start for start, stop in pairwise(bounds)]


class RowRange(NamedTuple):
    """The rows from ``start`` to before ``stop``."""

    start: int
    stop: int

    @property
    def n(self) -> int:
        return self.stop - self.start


def strip(bounds: Bounds, rank: int) -> RowRange:
    """The rows of a rank."""
    return RowRange(bounds[rank], bounds[rank + 1])


@dataclass(frozen=True)
class Window:
    """A layer that makes output row o of the rows o * stride - before + j * dilation, for j in 0..kernel - 1."""

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    """The rows of padding before the first; a number below 0 says how many rows are passed over."""

    @property
    def extent(self) -> int:
        """The number of rows from the first that an output reads to its last."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, length: int, after: int, *, ceil: bool = False) -> int:
        """The number of output rows of ``length`` rows, with ``after`` rows of padding behind the last. ``ceil``: a
        window that begins in the image, or in the padding before it, may end beyond all of it (``ceil_mode``)."""
        span = length + self.before + after - self.extent
        count = -(-span // self.stride) + 1 if ceil else span // self.stride + 1
        if ceil and (count - 1) * self.stride >= length + self.before:
            count -= 1
        return max(count, 0)

    def reads(self, rows: RowRange) -> RowRange:
        """The rows, padding among them, that these outputs are made of; an empty range for no outputs."""
        start = rows.start * self.stride - self.before
        return RowRange(start, start + (rows.n - 1) * self.stride + self.extent if rows.n > 0 else start)

    def real(self, rows: RowRange, length: int) -> RowRange:
        """The rows of the image, without padding, that these outputs are made of."""
        return within(self.reads(rows), length)

    def counts(self, rows: RowRange, length: int, after: int, *, padded: bool) -> list[int]:
        """The number of rows that each of these outputs is the mean of: those in the image, or with ``padded`` also
        those in the padding."""
        first, last = (-self.before, length + after) if padded else (0, length)
        starts = [o * self.stride - self.before for o in range(*rows)]
        return [min(start + self.kernel, last) - max(start, first) for start in starts]


@dataclass(frozen=True)
class Transposed:
    """A layer that adds input row i to the output rows i * stride - before + j * dilation, for j in 0..kernel - 1: a
    transposed convolution."""

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0

    @property
    def extent(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    def real(self, rows: RowRange, length: int) -> RowRange:
        """The rows that these outputs are made of, and perhaps some between them that are not."""
        if rows.n <= 0:
            return RowRange(0, 0)
        start = -(-(rows.start + self.before - self.extent + 1) // self.stride)
        return within(RowRange(start, (rows.stop - 1 + self.before) // self.stride + 1), length)


def within(rows: RowRange, length: int) -> RowRange:
    """The part of the rows that lies in the image."""
    start = min(max(rows.start, 0), length)
    return RowRange(start, max(min(rows.stop, length), start))


@lru_cache(_CACHED_PLANS)
def outputs_of(layer: Window | Transposed, bounds: Bounds, outputs: int) -> Bounds:
    """The strips of a layer's output: each rank makes the rows whose middle it has, so that little has to move; but
    where a rank would make more than its share, equal strips."""
    if isinstance(layer, Window):
        middle = (layer.extent - 1) // 2 - layer.before
        inner = [-(-(at - middle) // layer.stride) for at in bounds[1:-1]]
    else:
        middle = (layer.extent - layer.stride) // 2 - layer.before
        inner = [at * layer.stride + middle for at in bounds[1:-1]]
    found = (0, *(min(max(at, 0), outputs) for at in inner), outputs)
    ranks = len(bounds) - 1
    return found if max(sizes(found)) <= -(-outputs // ranks) else equal(outputs, ranks)


class Halo(NamedTuple):
    """The numbers of rows that each rank gets from others, to have the rows that it needs."""

    before: tuple[int, ...]
    """The number of rows that each rank gets directly before its own, by rank."""
    after: tuple[int, ...]
    """The number of rows that each rank gets directly behind its own, by rank."""

    @property
    def nothing(self) -> bool:
        return not any(self.before) and not any(self.after)


@lru_cache(_CACHED_PLANS)
def halo_of(bounds: Bounds, wanted: tuple[RowRange, ...]) -> Halo:
    """The halo that must move so that each rank has the rows it wants, with all rows between these and its own."""
    before, after = [], []
    for rank, rows in enumerate(wanted):
        own = strip(bounds, rank)
        before.append(max(own.start - rows.start, 0) if rows.n > 0 else 0)
        after.append(max(rows.stop - own.stop, 0) if rows.n > 0 else 0)
    return Halo(tuple(before), tuple(after))


@lru_cache(_CACHED_PLANS)
def wanted_by(layer: Window | Transposed, bounds: Bounds, made: Bounds) -> tuple[RowRange, ...]:
    """The rows that each rank needs for the outputs that it makes."""
    return tuple(layer.real(strip(made, rank), bounds[-1]) for rank in range(len(bounds) - 1))


class Edge(NamedTuple):
    """Rows of a neighbour, and the outputs that they have a part in."""

    rows: int
    """The number of the neighbour's rows."""
    offset: int
    """The place of the first of these rows among the rows that the outputs read."""
    length: int
    """The number of rows that the outputs read."""
    outputs: RowRange
    """The range of this rank's outputs that read the neighbour's rows, counted from its first output."""


class Inside(NamedTuple):
    """A rank's outputs as its own rows alone would give them, and what its two neighbours add to those at the edges."""

    padding: int
    """The rows of padding at both ends of a rank's own rows with which they give just as many outputs as the rank
    has."""
    above: Edge | None
    below: Edge | None


@lru_cache(_CACHED_PLANS)
def insides(window: Window, bounds: Bounds, made: Bounds) -> tuple[Inside, ...] | None:
    """The ``Inside`` of each rank; None where a rank has nothing to do, or needs more than its own rows and a part of
    its neighbours', or padding that differs at its two ends."""
    found = tuple(_inside(window, bounds, made, rank) for rank in range(len(bounds) - 1))
    return None if None in found else found  # type: ignore[return-value]


def _inside(window: Window, bounds: Bounds, made: Bounds, rank: int) -> Inside | None:
    own, outputs, length = strip(bounds, rank), strip(made, rank), bounds[-1]
    if own.n == 0 or outputs.n == 0:
        return None
    reads, step = window.reads(outputs), window.stride
    padding = own.start - reads.start
    if padding < 0 or (own.n + 2 * padding - window.extent) // step + 1 != outputs.n:
        return None
    real = within(reads, length)
    above, below = own.start - real.start, max(real.stop - own.stop, 0)
    if above > (own.start - bounds[rank - 1] if rank else 0):
        return None
    if below > (bounds[rank + 2] - own.stop if rank + 2 < len(bounds) else 0):
        return None
    count = min(-(-padding // step), outputs.n)
    top = Edge(above, padding - above, (count - 1) * step + window.extent, RowRange(0, count)) if above else None
    first = max(-(-(own.n + padding - window.extent + 1) // step), 0)
    start = first * step - padding
    spans = (outputs.n - 1 - first) * step + window.extent
    bottom = Edge(below, own.n - start, spans, RowRange(first, outputs.n)) if below else None
    if any(edge is not None and not 0 <= edge.offset <= edge.length - edge.rows for edge in (top, bottom)):
        return None
    return Inside(padding, top, bottom)


def mirrored(rows: RowRange, length: int, mode: str) -> list[int]:
    """The row of the image that each of these rows has its values from; rows outside of the image are padding of this
    mode."""
    if mode == "replicate":
        return [min(max(row, 0), length - 1) for row in range(*rows)]
    if mode == "circular":
        return [row % length for row in range(*rows)]
    assert mode == "reflect"
    last = length - 1
    return [abs(row) if row <= last else 2 * last - row for row in range(*rows)]


def hull(positions: Sequence[int]) -> RowRange:
    """The range from the first to the last of these positions."""
    return RowRange(min(positions), max(positions) + 1) if positions else RowRange(0, 0)
