"""Examples are dealt, not sampled: which examples step s sees, as a pure function of (seed, s).

So any run can resume, be split among another number of workers, and be compared; and every example is
accounted for exactly once an epoch.

Of a data set in parts, every batch has rows of all parts, in proportion to their lengths, and those of a part lie
together in it: ranks that have different parts take different rows of it, whichever ranks those are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from apportion.core.order import Index, Order
from apportion.core.rng import mix

GivenOrder = Literal["shuffled", "sequential"] | Order
"""An order as a workload has it."""
Words = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _scramble(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Draws:
    """Random numbers keyed by (seed, epoch, example), for augmentation: the same on any number of workers.

    Row i of every draw belongs to the i-th example of the batch; the k-th draw of a batch is a function of
    (seed, epoch, example, k) alone. Real numbers come in the dtype of the training's inputs.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        index: Index,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # The last number is a domain of its own: draws for examples must not repeat what permutations are drawn from
        # (0xDEA1) or what parts are (0x9A27, 0x9A47).
        key = np.uint64(mix(seed, epoch, 0xD4A3))
        with np.errstate(over="ignore"):
            self._keys = _scramble(_scramble(index.astype(np.uint64) * _GOLDEN + key))
        self._calls = 0
        self._device, self._dtype = device, dtype

    def _unit(self, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
        self._calls += 1
        width = int(np.prod(shape, dtype=np.int64))
        with np.errstate(over="ignore"):
            # The number of the call stands in the upper bits and the place within a row in the lower 40: two calls
            # share no counter, and a row is drawn alike however many rows the batch has on this rank.
            counter = np.arange(width, dtype=np.uint64) + np.uint64((self._calls << 40) & _MASK)
            bits = _scramble(self._keys[:, None] + _scramble(counter * _GOLDEN)[None, :])
        # The upper 53 bits, which is what a float64 holds: every result is exact and below 1.
        unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return unit.reshape(len(self._keys), *shape)

    def _tensor(self, array: np.ndarray[Any, Any], dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._dtype
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=self._device, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Real numbers of shape (n, *shape), each in [0, 1)."""
        # float64 just below 1 rounds up to 1.0 in a shorter type: keep the promise of the half-open interval.
        return self._tensor(self._unit(shape)).clamp_(max=1 - torch.finfo(self._dtype).eps / 2)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Numbers of shape (n, *shape) in int64, each in [low, high)."""
        if high <= low:
            raise ValueError(f"integers({low}, {high}) is an empty range: high must be above low")
        return self._tensor(np.floor(self._unit(shape) * (high - low)).astype(np.int64) + low, torch.int64)

    def bernoulli(self, probability: float, *shape: int) -> Tensor:
        """Booleans of shape (n, *shape), True with this probability."""
        return self._tensor(self._unit(shape) < probability, torch.bool)

    def normal(self, *shape: int) -> Tensor:
        """Real numbers of shape (n, *shape) from the standard normal distribution (Box-Muller)."""
        # 1 - u lies in (0, 1], so that the logarithm is finite.
        radius, angle = 1.0 - self._unit(shape), self._unit(shape)
        return self._tensor(np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle))


@dataclass(frozen=True)
class DataShard:
    """The part of the examples that a rank takes: its share of every batch, or whole batches in turn."""

    index: int = 0
    """The number of this rank's share."""
    of: int = 1
    """The number of shares that there are."""
    whole_batches: bool = False
    """Are whole batches dealt out in turn (approximate strategies)? False: each global batch is split (exact ones)."""
    shares: tuple[float, ...] | None = None
    """The relative sizes of the shares of a split batch; None: equal ones."""
    parts: tuple[int, int] | None = None
    """The first of the parts of the data set whose rows are split into shares, and the one after the last; None: all
    rows are."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"DataShard(index={self.index}, of={self.of}): index must be in 0..{self.of - 1}")
        if self.shares is not None and (len(self.shares) != self.of or min(self.shares) < 0 or sum(self.shares) <= 0):
            raise ValueError(f"shares={self.shares} must be {self.of} numbers of at least 0, one of them above 0")
        if self.parts is not None and (self.whole_batches or not 0 <= self.parts[0] < self.parts[1]):
            raise ValueError(f"parts={self.parts} must be a first part and a later end, of batches that are split")

    def rows(self, n: int) -> slice:
        """This share of n rows, the shares in order and contiguous. Equal shares differ by one row at most."""
        if self.whole_batches:
            return slice(0, n)
        if self.shares is None:
            small, larger = divmod(n, self.of)
            start = self.index * small + min(self.index, larger)
            return slice(start, start + small + (self.index < larger))
        ends = np.floor(np.cumsum((0.0, *self.shares)) / sum(self.shares) * n + 0.5).astype(int)
        return slice(int(ends[self.index]), int(ends[self.index + 1]))


class Sampler:
    """The order in which n examples are taken, in global batches; the last batch of an epoch may be short, or is left
    out (``drop_last``).

    ``shuffled``: slices of a permutation drawn from (seed, epoch). ``sequential``: slices in order; with ``lanes``,
    row b of every batch walks through its own contiguous stretch of the data, so that a recurrent state can follow
    it (truncated back-propagation through time); where the data does not divide, the first lanes are one longer. An
    ``Order``: slices of what it gives for (seed, epoch).
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        *,
        order: GivenOrder = "shuffled",
        seed: int = 0,
        lanes: bool = False,
        drop_last: bool = False,
    ) -> None:
        if examples < 1:
            raise ValueError("the dataset is empty: there is nothing to train on")
        self.examples, self.batch_size, self.order, self.seed, self.lanes = examples, batch_size, order, seed, lanes
        self.draws = examples
        """The number of examples that are taken in an epoch."""
        if isinstance(order, Order):
            order.check(examples)
            self.draws = order.length(examples)
        self.batches = batches_of(self.draws, batch_size, drop_last=drop_last)
        self._epoch = -1
        self._permutation: Index = np.empty(0, dtype=np.int64)

    def place(self, step: int) -> tuple[int, int]:
        """The (epoch, batch within it) of a step."""
        return divmod(step, self.batches)

    def index(self, step: int) -> Index:
        """The global batch of a step: indices into the dataset, in row order."""
        epoch, batch = divmod(step, self.batches)
        if self.lanes:
            return self._lanes(batch)
        start = batch * self.batch_size
        stop = min(start + self.batch_size, self.draws)
        if self.order == "sequential":
            return np.arange(start, stop, dtype=np.int64)
        if isinstance(self.order, Order):
            if epoch != self._epoch:
                self._permutation = self.order.epoch(self.examples, self.batch_size, self.seed, epoch)
                self._epoch = epoch
            return self._permutation[start:stop]
        if epoch != self._epoch:
            # A generator of its own: the permutation must not depend on what else was drawn in this process, nor move
            # that.
            generator = torch.Generator().manual_seed(mix(self.seed, epoch, 0xDEA1))
            self._permutation = torch.randperm(self.examples, generator=generator).numpy()
            self._epoch = epoch
        return self._permutation[start:stop]

    def _lanes(self, batch: int) -> Index:
        length, longer = divmod(self.examples, self.batch_size)
        lane = np.arange(self.batch_size if batch < length else longer, dtype=np.int64)
        return lane * length + np.minimum(lane, longer) + batch

    def size(self, step: int) -> int:
        """The number of examples in the global batch of a step."""
        batch = step % self.batches
        return min(self.batch_size, self.draws - batch * self.batch_size)

    def first_draw(self, step: int) -> int | None:
        """The number of draws of its epoch before a step's batch, where an order may take an example more than once;
        None where each comes once."""
        return step % self.batches * self.batch_size if isinstance(self.order, Order) else None

    def shard(self, step: int, shard: DataShard) -> tuple[int, slice]:
        """The step whose global batch is meant, and this shard's rows of it."""
        if shard.whole_batches:
            step = step * shard.of + shard.index
            return step, slice(0, self.size(step))
        size = self.size(step)
        if not self.lanes:
            return step, shard.rows(size)
        # A lane stays with its rank, whatever the length of the batch: its state is there.
        rows = shard.rows(self.batch_size)
        return step, slice(min(rows.start, size), min(rows.stop, size))

    def take(self, step: int, shard: DataShard) -> tuple[int, Index, slice, int]:
        """The step whose global batch is meant, the indices of this shard's rows of it, which rows of the batch they
        are, and the index of an example for a rank that has none."""
        step, rows = self.shard(step, shard)
        index = self.index(step)
        return step, index[rows], rows, int(index[0])


def batches_of(draws: int, batch_size: int, *, drop_last: bool) -> int:
    """The number of batches of an epoch of this many draws. Raises ValueError where ``drop_last`` leaves none."""
    if drop_last and draws < batch_size:
        raise ValueError(
            f"drop_last=True leaves no batch of an epoch of {draws} examples, which are fewer than batch_size="
            f"{batch_size}: use a smaller batch_size, or drop_last=False"
        )
    return draws // batch_size if drop_last else -(-draws // batch_size)


def split(n: int, parts: int) -> Sequence[slice]:
    """Split n rows into this many contiguous parts, whose sizes differ by one at most; empty parts are left out."""
    slices = (DataShard(i, parts).rows(n) for i in range(parts))
    return [s for s in slices if s.stop > s.start]


def rows_of_parts(lengths: Sequence[int], rows: int) -> list[int]:
    """The number of rows of each part among the first this many rows of an epoch.

    Row k of a part of n rows comes at the place (2 k + 1) / (2 n) of the epoch, of two at one place that of the first
    part first (the method of Webster and Sainte-Lague): the numbers only grow with ``rows``, and at the end of the
    epoch they are the lengths.
    """
    total, parts = sum(lengths), len(lengths)
    # Rounding all parts moves a place by parts / (2 total) at most: this many rows of each come before that place for
    # certain, and only the few that are left need the heap.
    counts = [max(0, ((2 * rows - parts) * n - 3 * total) // (2 * total)) for n in lengths]
    return webster(counts, lengths, rows - sum(counts))


def webster(counts: Sequence[int], sizes: Sequence[int], more: int) -> list[int]:
    """The counts after ``more`` more units are apportioned in proportion to ``sizes`` by the method of Webster and
    Sainte-Lague; of two equal claims the first has precedence."""
    counts = [*counts]
    claims = [((2 * count + 1) / size, at) for at, (count, size) in enumerate(zip(counts, sizes, strict=True))]
    heapq.heapify(claims)
    for _ in range(more):
        at = claims[0][1]
        counts[at] += 1
        heapq.heapreplace(claims, ((2 * counts[at] + 1) / sizes[at], at))
    return counts


@final
class PartSampler(Sampler):
    """Takes the rows of all parts in global batches, in the order of the parts within each batch.

    ``shuffled``: every part by a permutation of its own, drawn from (seed, epoch, part). ``sequential``: every part in
    its order. A rank that asks for the rows of its own parts draws no permutation of another part.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        order: GivenOrder = "shuffled",
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(sum(lengths), batch_size, order=order, seed=seed, drop_last=drop_last)
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
        """The indices of the rows that come first in the first epoch of these parts, this many at most."""
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
