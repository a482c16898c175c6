"""The places of the weights: parameters in one flat vector, and the vector in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.comm.sync import CACHE_LINE, round_up
from apportion.parallel.optim.hyperparameters import StoreRule, rule_of

SHARD_BYTES = 512 << 10
"""The bytes of a large shard: with its other copy and its gradient it fits a core's cache."""
LEAST_SHARDS, MOST_SHARDS = 8, 1024
LEAST_SHARD_BYTES = 4 << 10
"""The bytes below which a shard is not worth a lock of its own."""


@dataclass(frozen=True)
class StorePiece:
    """The part of a parameter that lies in a shard."""

    parameter: int
    group: int
    start: int
    stop: int


class StoreLayout:
    """The parameters of one optimizer, group by group in its order, in a flat vector cut into shards."""

    def __init__(self, names: Mapping[nn.Parameter, str], optimizer: Optimizer, *, shards: int | None = None) -> None:
        self.rule: StoreRule = rule_of(optimizer)
        groups = optimizer.param_groups
        found = [(p, g) for g, group in enumerate(groups) for p in group["params"] if p.requires_grad]
        if not found:
            raise ValueError("the optimizer was given no parameter that is trained: there is nothing to store")
        self.parameters = [p for p, _ in found]
        self.names = [names[p] for p in self.parameters]
        self.groups = [g for _, g in found]
        dtypes: dict[torch.dtype, str] = {}
        for name, p in zip(self.names, self.parameters, strict=True):
            dtypes.setdefault(p.dtype, name)
        first_of_each = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        if len(dtypes) > 1:
            raise ValueError(f"a parameter store holds weights of one type, and {first_of_each}: use one type")
        (self.dtype,) = dtypes
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a parameter store holds float32 or float64, and {first_of_each}: use one of these types")
        self.group_count = len(groups)
        self.hyper = self.rule.numbers(groups[0])
        """The number of hyperparameters of a group."""
        align = CACHE_LINE // self.dtype.itemsize
        self.starts, end = [], 0
        for p in self.parameters:
            self.starts.append(end)
            end += round_up(p.numel(), align)
        self.total = end
        self.bounds = _cut(end, self.dtype.itemsize, align, shards)
        self.shards = len(self.bounds) - 1
        self.pieces = [list(self._pieces(a, b)) for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def _pieces(self, start: int, stop: int) -> Iterator[StorePiece]:
        ends = [*self.starts[1:], self.total]
        for number, (first, last) in enumerate(zip(self.starts, ends, strict=True)):
            if first < stop and last > start:
                yield StorePiece(number, self.groups[number], max(first, start), min(last, stop))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's place in a flat vector, in its own shape and strides."""
        views = []
        for p, start in zip(self.parameters, self.starts, strict=True):
            part = flat[start : start + p.numel()]
            dense = p.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense(p.detach())
            views.append(part.as_strided(p.shape, p.stride()) if dense else part.view(p.shape))
        return views


def updates_alike(rule: StoreRule, counts: Sequence[Any]) -> float | None:
    """Return the number of updates that all pieces of some shards have behind them, given an array a shard (0 where the
    rule does not count); None where they differ, and each piece has to be updated by itself."""
    if not rule.counted:
        return 0.0
    every = [count for of in counts for count in of.tolist()]
    return float(every[0]) if every and every.count(every[0]) == len(every) else None


def _cut(total: int, itemsize: int, align: int, shards: int | None) -> Sequence[int]:
    nbytes = total * itemsize
    if shards is None:
        few = max(1, min(LEAST_SHARDS, nbytes // LEAST_SHARD_BYTES))
        shards = min(MOST_SHARDS, max(few, -(-nbytes // SHARD_BYTES)))
    size = -(-total // (shards * align)) * align
    return [*range(0, total, size), total]
