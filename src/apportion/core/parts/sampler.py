"""The order in which the rows of a data set in parts are taken: a function of the seed and the parts alone.

Every batch has rows of all parts, in proportion to their lengths, and those of a part lie together in it: so ranks that
have different parts take different rows of it, whichever ranks those are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from apportion.core.sampling.sampler import DataShard, Index, Order, Sampler, mix


def rows_of_parts(lengths: Sequence[int], rows: int) -> list[int]:
    """The number of rows of each part among the first so many rows of an epoch.

    Row k of a part of n rows comes at the place (2 k + 1) / (2 n) of the epoch, of two at one place that of the first
    part first (the method of Webster and Sainte-Lague): the numbers only grow with ``rows``, and at the end of the
    epoch they are the lengths.
    """
    total, parts = sum(lengths), len(lengths)
    # Rounding all parts moves a place by parts / (2 total) at most: so many rows are there for certain.
    counts = [max(0, ((2 * rows - parts) * n - 3 * total) // (2 * total)) for n in lengths]
    places = [((2 * count + 1) / n, part) for part, (count, n) in enumerate(zip(counts, lengths, strict=True))]
    heapq.heapify(places)
    for _ in range(rows - sum(counts)):
        part = places[0][1]
        counts[part] += 1
        heapq.heapreplace(places, ((2 * counts[part] + 1) / lengths[part], part))
    return counts


@final
class PartSampler(Sampler):
    """Takes the rows of all parts in global batches, in the order of the parts within each batch.

    ``shuffled``: every part by a permutation of its own, drawn from (seed, epoch, part). ``sequential``: every part in
    its order. A rank that asks for the rows of its own parts draws no permutation of another part.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, order: Order = "shuffled", seed: int = 0) -> None:
        super().__init__(sum(lengths), batch_size, order=order, seed=seed)
        self.lengths = tuple(lengths)
        self._first = [0, *np.cumsum(lengths).tolist()]
        self._orders: dict[int, Index] = {}
        self._ordered_epoch = -1
        self._counted: dict[int, list[int]] = {}

    def index(self, step: int) -> Index:
        return self._rows(step, slice(0, self.size(step)))

    def shard(self, step: int, shard: DataShard) -> tuple[int, slice]:
        if shard.parts is None:
            return super().shard(step, shard)
        first, end = shard.parts
        begin, stop = self._bounds(step)
        before = sum(stop[:first]) - sum(begin[:first])
        rows = shard.rows(sum(stop[first:end]) - sum(begin[first:end]))
        return step, slice(before + rows.start, before + rows.stop)

    def take(self, step: int, shard: DataShard) -> tuple[int, Index, slice, int]:
        step, rows = self.shard(step, shard)
        index = self._rows(step, rows)
        if len(index):
            return step, index, rows, int(index[0])
        if shard.parts is None:
            return step, index, rows, int(self._rows(step, slice(0, 1))[0])
        # A row of another part cannot be read here: the next one of its own stands in.
        part = shard.parts[0]
        at = min(self._bounds(step)[0][part], self.lengths[part] - 1)
        return step, index, rows, int(self._order_of(step // self.batches, part)[at]) + self._first[part]

    def first_rows(self, parts: Sequence[int], rows: int) -> Index:
        """The indices of the rows that come first in the first epoch of these parts, so many at most."""
        first = [self._order_of(0, part)[:rows] + self._first[part] for part in parts]
        return np.concatenate(first)[:rows]

    def _rows(self, step: int, rows: slice) -> Index:
        """The indices of these rows of a step's batch."""
        begin, stop = self._bounds(step)
        found, before = [], 0
        for part, (low, high) in enumerate(zip(begin, stop, strict=True)):
            start, end = max(rows.start - before, 0), min(rows.stop - before, high - low)
            if end > start:
                found.append(self._order_of(step // self.batches, part)[low + start : low + end] + self._first[part])
            before += high - low
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _bounds(self, step: int) -> tuple[list[int], list[int]]:
        """The number of rows of each part that are taken in an epoch before a step's batch, and with it."""
        start = step % self.batches * self.batch_size
        return self._counts(start), self._counts(min(start + self.batch_size, self.examples))

    def _counts(self, rows: int) -> list[int]:
        if rows not in self._counted:
            if len(self._counted) > 2:  # the batch before, this one, and the next
                self._counted.pop(next(iter(self._counted)))
            self._counted[rows] = rows_of_parts(self.lengths, rows)
        return self._counted[rows]

    def _order_of(self, epoch: int, part: int) -> Index:
        if self.order == "sequential":
            epoch = 0
        if epoch != self._ordered_epoch:
            self._orders, self._ordered_epoch = {}, epoch
        if part not in self._orders:
            self._orders[part] = self._drawn(epoch, part)
        return self._orders[part]

    def _drawn(self, epoch: int, part: int) -> Index:
        if self.order == "sequential":
            return np.arange(self.lengths[part], dtype=np.int64)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, part, 0x9A27))
        drawn: Index = torch.randperm(self.lengths[part], generator=generator).numpy()
        return drawn
