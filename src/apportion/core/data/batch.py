"""Batches: the examples a rank computes at a step, loaded when they are first touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from apportion.core.data.rows import misfit_of, row_count, rows_of
from apportion.core.loss_terms import Count, examples, terms_of
from apportion.core.sampler import DataShard, Draws, Index, split


class BatchLoader(Protocol):
    """The source of a batch, as far as a batch knows it: it loads the rows, and says where they go."""

    seed: int
    count: Count | None
    keeps_rows: bool
    """True where a batch has a row for each of its examples, whatever they are: torch's collate, and no augment."""
    device: torch.device
    dtype: torch.dtype | None

    def load(self, batch: Batch) -> tuple[Any, Any]:
        """Returns the inputs and the targets of a batch."""


class Whole(NamedTuple):
    """A global batch, of which ranks take rows."""

    step: int
    epoch: int
    size: int
    """The number of examples in the global batch."""
    start: bool
    """Is the batch the first of its epoch?"""
    lender: int
    """The index of an example of the global batch, for ranks that have none."""


class Batch:
    """Some rows of one global batch.

    ``inputs`` and ``targets`` are loaded when first touched. A rank may have no rows of a short batch: ``index`` is
    empty, ``count`` is 0, and ``borrowed()`` gives a row of another rank to take part in collectives with.
    """

    __slots__ = (
        "_cut",
        "_loaded",
        "_rows_found",
        "_source",
        "_whole",
        "epoch",
        "first_lane",
        "index",
        "offset",
        "request",
        "rows",
        "size",
        "start",
        "step",
    )

    def __init__(  # noqa: PLR0913 (where its rows are, and where they come from; all of it by name)
        self,
        source: BatchLoader,
        whole: Whole,
        *,
        index: Index,
        rows: slice,
        first_lane: int = 0,
        loaded: tuple[Any, Any] | None = None,
        request: tuple[int, DataShard] | None = None,
        cut: tuple[Batch, slice] | None = None,
        offset: int = 0,
    ) -> None:
        """Describes rows of a global batch. ``loaded``: their inputs and targets, where they are loaded already;
        ``cut``: the batch that they are loaded with, and their place in it."""
        self._source, self._whole, self._loaded, self._cut = source, whole, loaded, cut
        self._rows_found: int | None = None
        self.step = whole.step
        """The global step that this batch belongs to: the key of every draw made with it."""
        self.epoch = whole.epoch
        self.index = index
        """The indices of the rows in the dataset, in row order."""
        self.rows = rows
        """The rows of the global batch that these are."""
        self.size = whole.size
        """The number of examples in the whole global batch, over all ranks."""
        self.start = whole.start
        """True on the first batch of an epoch: a carried state starts anew."""
        self.first_lane = first_lane
        """The first row of any batch that this rank may take, where a state is carried."""
        self.request = request
        """The request that loading processes know the rows by; None where none load them."""
        self.offset = offset
        """The number of rows before these in a batch that is loaded in parts, since each part draws for itself."""

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, rows={self.rows.start}:{self.rows.stop} of {self.size})"

    @property
    def inputs(self) -> Any:
        """The inputs that the model is called with."""
        return self._load()[0]

    @property
    def targets(self) -> Any:
        """The targets that the loss compares the outputs with."""
        return self._load()[1]

    @property
    def count(self) -> float:
        """The number of loss terms in these rows: the weight of their mean."""
        if self.rows.start == self.rows.stop:  # empty, or borrowed
            return 0.0
        count = self._source.count
        if count is None or self.counts_rows:  # known without loading anything
            return float(len(self.index))
        if count is examples:
            return float(self.row_count)
        return terms_of(count, self.targets)

    @property
    def counts_rows(self) -> bool:
        """True where every example has one loss term, so that every rank knows how many the whole batch has."""
        return self._source.count is examples and self._source.keeps_rows

    @property
    def row_count(self) -> int:
        """The number of rows that collate made of these examples: fewer where it left some out, more where it added
        some or packed them. ValueError where the leaves disagree."""
        if self._source.keeps_rows:  # known without loading anything
            return len(self.index)
        if self._rows_found is None:
            self._rows_found = row_count(*self._load(), len(self.index))
        return self._rows_found

    @property
    def averaged_rows(self) -> int:
        """The number of rows by which an average of replicas weighs what one has learnt from this batch: those that
        collate made, or the examples where a workload that states its loss terms has leaves that disagree on them."""
        try:
            return self.row_count
        except ValueError:
            if self._source.count is examples:  # the loss terms cannot be derived either
                raise
            return len(self.index)

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            if not len(self.index):
                raise ValueError(f"{self} has no rows: there is nothing to load; see borrowed()")
            if self._cut is not None:
                self._loaded = self._cut[0]._cut_out(self._cut[1])
            else:
                self._loaded = self._source.load(self)
        return self._loaded

    def _cut_out(self, piece: slice) -> tuple[Any, Any]:
        """Inputs and targets of a piece of these rows. ValueError, which names the leaf, where they cannot be cut."""
        inputs, targets = self._load()
        examples = len(self.index)
        if piece == slice(0, examples):
            return inputs, targets
        rows = examples if self._source.keeps_rows else self.row_count
        if rows > examples:
            misfit = misfit_of(targets, examples, "targets") or misfit_of(inputs, examples, "inputs")
            raise ValueError(
                f"{misfit}: rows that collate has added to its examples or packed belong together, and cannot be cut "
                "into micro-batches; use a strategy that does not cut a batch on its rank"
            )
        if rows < examples:  # some were left out: the others are divided as evenly
            # Both ends by one formula, so that neighbouring pieces meet and none of the rows is left out or taken
            # twice.
            piece = slice(piece.start * rows // examples, piece.stop * rows // examples)
        return rows_of(inputs, piece, rows, "inputs"), rows_of(targets, piece, rows, "targets")

    def hold(self, inputs: Any, targets: Any) -> None:
        """Take these as the inputs and targets of the rows."""
        self._loaded, self._rows_found = (inputs, targets), None

    def let_go(self) -> None:
        """Let go of inputs and targets, which are loaded again when they are touched again."""
        self._loaded = self._rows_found = None

    def draws(self) -> Draws:
        """Random numbers keyed by (seed, epoch, example): the same on any number of workers."""
        source = self._source
        return Draws(source.seed, self.epoch, self.index, device=source.device, dtype=source.dtype or torch.float32)

    def replace(self, *, inputs: Any = None, targets: Any = None) -> Batch:
        """A batch of the same rows with other inputs or targets (what an ``augment`` returns)."""
        if inputs is None or targets is None:
            loaded = self._load()
            inputs, targets = loaded[0] if inputs is None else inputs, loaded[1] if targets is None else targets
        return self._part(self.index, self.rows, loaded=(inputs, targets))

    def _part(self, index: Index, rows: slice, **origin: Any) -> Batch:
        return Batch(self._source, self._whole, index=index, rows=rows, first_lane=self.first_lane, **origin)

    def _piece(self, piece: slice, **origin: Any) -> Batch:
        first = self.rows.start
        return self._part(self.index[piece], slice(first + piece.start, first + piece.stop), **origin)

    def parts(self, n: int) -> list[Batch]:
        """These rows in at most n micro-batches, in order; all are loaded when the first is touched: what collate
        and augment do does not depend on n."""
        if n == 1 or len(self.index) <= 1:
            return [self]
        return [self._piece(piece, cut=(self, piece)) for piece in split(len(self.index), n)]

    def by_itself(self) -> Batch:
        """The same rows as a global batch of their own, for ranks that together hold one of several replicas."""
        whole = self._whole._replace(size=len(self.index))
        cut = (self, slice(0, len(self.index)))
        return Batch(self._source, whole, index=self.index, rows=self.rows, first_lane=self.first_lane, cut=cut)

    def stream(self, most: int) -> Iterator[Batch]:
        """These rows in order, at most this many at once. Each part is loaded when it is touched and gone when it is
        let go: for what does not fit the memory at once. Collate and augment see one part at a time."""
        pieces = -(-len(self.index) // most)
        if self._loaded is not None or pieces <= 1:
            yield from self.parts(pieces)
            return
        for piece in split(len(self.index), pieces):
            yield self._piece(piece, offset=piece.start)

    def borrowed(self) -> Batch:
        """One example of this global batch, for a rank that has none: computed with weight 0, so that it can take
        part in the collectives inside the model. A real one: where it gives a NaN, its owner's does too."""
        return self._part(np.array([self._whole.lender], dtype=np.int64), slice(self.rows.start, self.rows.start))


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
