"""The rows around a rank's own, from whichever ranks hold them, and their gradients back.

::

    rank 0    | 0 1 2 3 |
    rank 1            | 4 5 |            before 3, after 1: wants 1 2 3 of rank 0 and 6 of rank 2
    rank 2                | 6 7 8 |

Only neighbours that hold what another wants talk to each other; a halo may reach over several ranks, and a rank may
hold no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from apportion.comm.group import Group, Work

Span = tuple[int, int, int]
"""(rank, start, rows)."""


@dataclass(frozen=True)
class Reach:
    """Which rows this rank gets and gives."""

    dim: int
    rows: int
    """Of this rank's own."""
    before: int
    after: int
    wanted: tuple[Span, ...]
    """From which rank, from where on in the own rows with their halo."""
    given: tuple[Span, ...]
    """To which rank, from where on in the own rows."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(sizes: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], rank: int, dim: int) -> Reach:
        ends = list(accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        _check(sizes, before, after)
        wanted, given = [], []
        for other in range(len(sizes)):
            if other == rank:
                continue
            first, rows = _overlap(starts, ends, before, after, rank, other)
            if rows:
                wanted.append((other, first - (starts[rank] - before[rank]), rows))
            first, rows = _overlap(starts, ends, before, after, other, rank)
            if rows:
                given.append((other, first - starts[rank], rows))
        return Reach(dim, sizes[rank], before[rank], after[rank], tuple(wanted), tuple(given))


def _check(sizes: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...]) -> None:
    if not len(before) == len(after) == len(sizes):
        raise ValueError(f"halo: before={before} and after={after} must have one number for each of {len(sizes)} ranks")
    start, whole = 0, sum(sizes)
    for rank, size in enumerate(sizes):
        end = start + size
        if not (0 <= before[rank] <= start and 0 <= after[rank] <= whole - end):
            raise ValueError(
                f"halo: rank {rank} has rows {start}..{end - 1} of {whole} and wants before={before[rank]}, "
                f"after={after[rank]}: at most {start} lie before and {whole - end} after; pad at the border instead"
            )
        start = end


def _overlap(
    starts: list[int], ends: list[int], before: tuple[int, ...], after: tuple[int, ...], wants: int, holds: int
) -> tuple[int, int]:
    """The first of the rows that one rank wants of another, and how many."""
    low = starts[wants] - before[wants] if holds < wants else ends[wants]
    high = starts[wants] if holds < wants else ends[wants] + after[wants]
    first = max(low, starts[holds])
    return first, max(0, min(high, ends[holds]) - first)


def _send(x: Tensor, group: Group, dim: int, spans: tuple[Span, ...]) -> list[Work]:
    return [group.send(x.narrow(dim, start, rows).contiguous(), rank) for rank, start, rows in spans]


def _receive(like: Tensor, group: Group, dim: int, spans: tuple[Span, ...]) -> list[tuple[Tensor, Work]]:
    received = []
    for rank, _, rows in spans:
        shape = list(like.shape)
        shape[dim] = rows
        strip = like.new_empty(shape)
        received.append((strip, group.receive(strip, rank)))
    return received


def with_halo(x: Tensor, group: Group, reach: Reach) -> Tensor:
    """The rows before, x, and the rows after."""
    dim = reach.dim
    works = _send(x, group, dim, reach.given)
    strips = _receive(x, group, dim, reach.wanted)
    shape = list(x.shape)
    shape[dim] = reach.before + reach.rows + reach.after
    whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format(x))
    whole.narrow(dim, reach.before, reach.rows).copy_(x)  # while they are on their way
    for (_, start, rows), (strip, work) in zip(reach.wanted, strips, strict=True):
        work.wait()
        whole.narrow(dim, start, rows).copy_(strip)
    for sending in works:
        sending.wait()
    return whole


def without_halo(gradient: Tensor, group: Group, reach: Reach) -> Tensor:
    """The adjoint: the own rows, each with what it was given for where it had been sent."""
    works = _send(gradient, group, reach.dim, reach.wanted)
    strips = _receive(gradient, group, reach.dim, reach.given)
    own = gradient.narrow(reach.dim, reach.before, reach.rows).clone(memory_format=_format(gradient))
    _add(own, strips, reach)
    for sending in works:
        sending.wait()
    return own


def _add(own: Tensor, strips: list[tuple[Tensor, Work]], reach: Reach) -> None:
    for (_, start, rows), (strip, work) in zip(reach.given, strips, strict=True):
        work.wait()
        own.narrow(reach.dim, start, rows).add_(strip)


def _format(x: Tensor) -> torch.memory_format:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format
