"""The elements of the plain model's tensors that each rank holds, and the way that whole tensors are put together from
them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Index = tuple[Sequence[int] | range, ...]


@dataclass(frozen=True)
class TensorShard:
    """The part that a rank holds of a whole tensor of the plain model."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    index: Index | None = None
    """The positions held, in any order, one sequence for each dimension (dimensions after the last one given: all);
    None: the whole tensor."""
    partial: bool = False
    """Tells whether its gradient here is one term of a sum over all ranks that hold it."""

    def __post_init__(self) -> None:
        if self.index is None:
            return
        assert len(self.index) <= len(self.shape), "no more positions than dimensions"
        for held, length in zip(self.index, self.shape, strict=False):
            assert not len(held) or 0 <= min(held) <= max(held) < length, f"{held} of {length}"

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what is held."""
        if self.index is None:
            return self.shape
        return (*map(len, self.index), *self.shape[len(self.index) :])

    @property
    def numel(self) -> int:
        """The number of elements held."""
        return math.prod(self.local_shape)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this piece of a whole tensor: a view where its positions are evenly spaced, else a copy."""
        for dim, held in enumerate(self.index or ()):
            found = _evenly(held)
            if found is not None:
                whole = whole[(slice(None),) * dim + (found,)]
            else:
                whole = whole.index_select(dim, torch.tensor(held, dtype=torch.int64, device=whole.device))
        return whole

    def put(self, piece: Tensor, whole: Tensor) -> None:
        """Write the piece into the whole tensor where it belongs."""
        slices = [_evenly(held) for held in self.index or ()]
        if None not in slices:
            whole[tuple(slices)].copy_(piece)
            return
        dims = len(self.shape)
        positions = [
            torch.tensor(held, dtype=torch.int64, device=whole.device).view(-1, *(1,) * (dims - dim - 1))
            for dim, held in enumerate((*(self.index or ()), *map(range, self.shape[len(self.index or ()) :])))
        ]
        whole[tuple(positions)] = piece

    def places(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the positions in a form that is equal for the same elements in the same order; None: the whole
        tensor."""
        if self.index is None:
            return None
        return tuple(_run(held) for held in (*self.index, *map(range, self.shape[len(self.index) :])))

    def plain(self) -> list[Any]:
        """Return the shard as JSON."""
        index = None if self.index is None else [_run(held) for held in self.index]
        return [list(self.shape), index, self.partial]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> TensorShard:
        """Return the shard that ``plain`` gave as JSON."""
        shape, index, partial = plain
        held = None if index is None else tuple(range(*p[1:]) if p[0] == _RUN else p[1:] for p in index)
        return cls(tuple(shape), held, partial)


_RUN, _LIST = -1, -2


def _run(held: Sequence[int]) -> tuple[int, ...]:
    """Return positions in few numbers, where they are evenly spaced."""
    found = _evenly(held)
    return (_LIST, *held) if found is None else (_RUN, found.start, found.stop, found.step)


def _evenly(held: Sequence[int]) -> slice | None:
    """Return ascending positions at equal distances as a slice; None where they are not."""
    if not len(held):
        return slice(0, 0, 1)
    first, last = held[0], held[-1]
    step = held[1] - first if len(held) > 1 else 1
    run = range(first, last + 1, step) if step > 0 else range(0)
    even = held == run if isinstance(held, range) else len(held) == len(run) and all(map(int.__eq__, held, run))
    return slice(first, last + 1, step) if even else None


Holders = Sequence[tuple[int, TensorShard]]
"""Pairs (rank, what it holds) of one tensor, in rank order."""


@dataclass(frozen=True)
class ShardLayout:
    """The shards of each tensor that the ranks hold, by name."""

    holders: Mapping[str, Holders]

    @classmethod
    def from_plain(cls, plain: Iterable[Mapping[str, list[Any]]]) -> ShardLayout:
        """Build the layout from what each rank tells, in rank order: its pieces by name, as JSON."""
        holders: dict[str, list[tuple[int, TensorShard]]] = {}
        for rank, pieces in enumerate(plain):
            for name, piece in pieces.items():
                holders.setdefault(name, []).append((rank, TensorShard.from_plain(piece)))
        return cls(holders)

    def owners(self, name: str) -> Holders:
        """Return the fewest holders whose pieces are the whole tensor, each element once; the lowest ranks that will
        do."""
        holders = self.holders.get(name, ())
        for rank, piece in holders:
            if piece.index is None:
                return [(rank, piece)]
        found: dict[Any, tuple[int, TensorShard]] = {}
        for rank, piece in holders:
            if piece.numel:
                found.setdefault(piece.places(), (rank, piece))
        held, needed = sum(piece.numel for _, piece in found.values()), math.prod(holders[0][1].shape) if holders else 1
        assert held == needed, f"the ranks hold {held} elements of {name}, which has {needed}"
        return sorted(found.values(), key=lambda owner: owner[0])

    def owned(self, rank: int) -> set[str]:
        """Return the names of the tensors that this rank owns or owns a piece of."""
        return {name for name in self.holders if any(rank == owner for owner, _ in self.owners(name))}

    def sums(self) -> list[tuple[str, TensorShard, list[int]]]:
        """Return the gradients to sum: (name, piece, the ranks whose gradients are its terms), in the same order on
        every rank."""
        found: dict[tuple[str, Any], tuple[str, TensorShard, list[int]]] = {}
        for name, holders in self.holders.items():
            for rank, piece in holders:
                if piece.partial and piece.numel:
                    found.setdefault((name, piece.places()), (name, piece, []))[2].append(rank)
        return [summed for summed in found.values() if len(summed[2]) > 1]
