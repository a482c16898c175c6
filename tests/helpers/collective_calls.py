"""Collectives on made tensors, and what they must give by hand."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from apportion.comm.group import Group
from apportion.comm.shared_memory_group import PIECE, SharedMemoryGroup

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective on made tensors. ``extra``: the rows that each rank has besides, for ``all_gather_rows`` and
    ``gather_parts``."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: int
    extra: tuple[int, ...]
    seed: int

    def tensor(self, rank: int, size: int) -> Tensor:
        rows = (self.extra[rank],) if self.kind in ("all_gather_rows", "gather_parts") else ()
        rows = (size,) if self.kind == "reduce_scatter" else rows
        made = torch.randn((*rows, *self.shape), generator=torch.Generator().manual_seed(self.seed * 8 + rank))
        return (made > 0) if self.dtype == torch.bool else (made * 9).to(self.dtype)

    def by_hand(
        self, size: int, own: int = 0, hosts: Sequence[Sequence[int]] = (), ring_bytes: float = math.inf
    ) -> list[Tensor]:
        """What every rank must have; this one, where they differ. ``hosts``: the ranks of each host, which add up their
        own before the hosts do; none: all ranks in a row. ``ring_bytes``: the bytes of a rank's part from which on a
        sum goes round in a ring."""
        parts = [self.tensor(rank, size) for rank in range(size)]
        if self.kind == "all_gather":
            return [torch.stack(parts)]
        if self.kind in ("all_gather_rows", "gather_parts"):
            return parts
        if self.kind == "broadcast":
            return [parts[self.source % size]]
        if self.kind == "mean":
            parts = [part * (1.0 / size) for part in parts]
        sums = [_in_order([parts[rank] for rank in ranks]) for ranks in hosts] or parts
        slices = min(map(len, hosts), default=1)
        in_slices = self.kind in ("all_reduce", "total")
        total = by_slices(sums, slices, ring_bytes) if in_slices else _in_order(sums)
        return [total[own] if self.kind == "reduce_scatter" else total]

    def on(self, group: Group) -> list[Tensor]:
        tensor = self.tensor(group.rank, group.size)
        if self.kind == "total":
            same = tensor.clone()
            total = group.total(tensor)
            assert torch.equal(tensor.view(-1), same.view(-1)), "what is summed stays"
            return [total]
        if self.kind == "gather_parts":
            parts = [torch.empty((rows, *self.shape), dtype=self.dtype) for rows in self.extra[: group.size]]
            group.gather_parts(tensor, parts)
            return parts
        if self.kind == "reduce_scatter":
            into = torch.empty(self.shape, dtype=self.dtype)
            group.reduce_scatter(
                tensor.view(group.size, -1) if tensor.numel() else tensor.view(group.size, 0), into.view(-1)
            )
            return [into]
        if self.kind == "all_gather":
            return [group.all_gather(tensor)]
        if self.kind == "all_gather_rows":
            return group.all_gather_rows(tensor)
        if self.kind == "broadcast":
            group.broadcast(tensor, source=self.source % group.size)
        elif self.kind == "mean":
            assert isinstance(group, SharedMemoryGroup)
            group.mean(tensor)
        else:
            group.all_reduce(tensor).wait()
        return [tensor]


def _in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def by_slices(terms: list[Tensor], slices: int, ring_bytes: float) -> Tensor:
    """The sum of what so many slices of a tensor are on each host."""
    sums = []
    for slice_ in zip(*(term.reshape(-1).tensor_split(slices) for term in terms), strict=True):
        in_a_ring = len(terms) > 2 and slice_[0].nbytes >= len(terms) * ring_bytes
        sums.append(in_ring(list(slice_)) if in_a_ring else _in_order(list(slice_)))
    return torch.cat(sums).view(terms[0].shape)


def in_ring(terms: list[Tensor]) -> Tensor:
    """The sum in the order of a ring: each part in rank order from its own rank on."""
    parts = [term.reshape(-1).tensor_split(len(terms)) for term in terms]
    sums = [
        _in_order([parts[(part + hop) % len(terms)][part] for hop in range(len(terms))]) for part in range(len(terms))
    ]
    return torch.cat(sums).view(terms[0].shape)


def digest(tensors: list[Tensor]) -> str:
    """Of the bits, shapes and types."""
    told = hashlib.sha256()
    for tensor in tensors:
        told.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        told.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


KINDS = [
    "all_reduce", "total", "mean", "all_gather", "all_gather_rows", "gather_parts", "reduce_scatter", "broadcast",
]  # fmt: skip


@st.composite
def calls(draw: Any, kinds: Sequence[str] = KINDS) -> Call:
    kind = draw(st.sampled_from(kinds))
    dtype = draw(st.sampled_from([d for d in DTYPES if d.is_floating_point] if kind == "mean" else DTYPES))
    whole = PIECE // dtype.itemsize
    near = st.builds(lambda pieces, more: max(0, pieces * whole + more), st.integers(0, 2), st.integers(-2, 2))
    shapes = st.one_of(
        st.builds(lambda n: (n,), near),
        st.builds(lambda n: (n,), st.integers(0, 300)),
        st.just(()),
        st.lists(st.integers(0, 7), min_size=2, max_size=3).map(tuple),
    )
    if kind in ("all_gather_rows", "gather_parts"):
        shapes = st.lists(st.integers(0, 100), max_size=2).map(tuple)
    most = draw(st.sampled_from([0, 1, 40]))
    extra = tuple(draw(st.lists(st.integers(0, most), min_size=5, max_size=5)))
    return Call(kind, dtype, draw(shapes), draw(st.integers(0, 4)), extra, draw(st.integers(0, 1000)))
