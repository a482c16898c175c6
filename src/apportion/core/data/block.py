"""Blocks: the rows of several consecutive batches, gathered at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from apportion.core.data.batch import Whole
from apportion.core.data.sampler import DataShard, Index

ALIGN = 64
"""The number of bytes that the address of a tensor's memory is a multiple of."""


@dataclass(slots=True)
class BatchPart:
    """One shard's rows of one batch."""

    whole: Whole
    index: Index
    rows: slice
    loaded: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Block:
    """One shard's rows of several consecutive batches, gathered at once."""

    shard: DataShard
    first: int
    parts: list[BatchPart]

    def has(self, step: int, shard: DataShard) -> bool:
        """Tells whether the block holds these rows."""
        return shard is self.shard and 0 <= step - self.first < len(self.parts)


def aligned(rows: Tensor) -> Tensor:
    """The rows in memory that begins as a batch's by itself would: products of matrices round by where their numbers
    lie, and a block begins wherever a process has begun."""
    return rows if rows.data_ptr() % ALIGN == 0 else rows.clone()
