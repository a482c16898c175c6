"""Cutting the parameters of a layer: each rank keeps some rows or columns of a whole one, under its plain name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from apportion.comm.group import Group
from apportion.core.sampler import DataShard
from apportion.parallel.partition.tensor_shards import TensorShard


def shares(width: int, ranks: int) -> list[range]:
    """The units that each rank holds of ``width``, in order; one more or less, and none where there are fewer units
    than ranks."""
    rows = (DataShard(rank, ranks).rows(width) for rank in range(ranks))
    return [range(s.start, s.stop) for s in rows]


@final
class Slicer:
    """A slicer that cuts layers of one model for one rank, and notes what it has kept of which parameter."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.group = group
        self.pieces: dict[str, TensorShard] = {}
        self._names: dict[int, list[str]] = {}
        self._cut: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(p), []).append(name)

    def own_units(self, width: int) -> range:
        """The units that this rank has of ``width`` units."""
        return shares(width, self.group.size)[self.group.rank]

    def cut(self, layer: nn.Module, name: str, *index: Sequence[int] | None) -> None:
        """Keep these positions along each dimension (None: all) of a parameter of the layer. A parameter that layers
        have in common is cut once, and they have the slice in common."""
        whole = getattr(layer, name)
        if whole is None:
            return
        if id(whole) not in self._cut:
            positions = tuple(range(n) if i is None else i for i, n in zip(index, whole.shape, strict=True))
            piece = TensorShard(tuple(whole.shape), positions)
            for plain in self._names[id(whole)]:
                self.pieces[plain] = piece
            kept = piece.slice_of(whole.detach()).clone(memory_format=torch.contiguous_format)
            self._cut[id(whole)] = nn.Parameter(kept, requires_grad=whole.requires_grad), whole
        setattr(layer, name, self._cut[id(whole)][0])

    def first_only(self, layer: nn.Module, name: str) -> None:
        """Keep the parameter on rank 0, and nothing of it on the others: a bias that is added to a sum over ranks,
        once."""
        whole = getattr(layer, name)
        if whole is not None:
            rest = [None] * (whole.dim() - 1)
            self.cut(layer, name, range(len(whole) if self.group.rank == 0 else 0), *rest)
