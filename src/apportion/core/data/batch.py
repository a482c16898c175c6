"""Batches: the examples a rank computes at a step, loaded when they are first touched.

A batch also has the number of rows of what collate has returned, and takes parts of it.

Collate is given examples, and may return another number of rows: it may leave broken examples out, pack sequences into
one row, or give what has no rows at all, as a graph. A value has ``n`` rows where each of its leaves has:

- a dense tensor (or numpy array) with size ``n`` in dimension 0;
- a list or tuple with an entry a row: ``n`` entries, which are not all tensors of ``n`` rows themselves;
- a number, a text, None, or a list of another length without tensors: these belong to the batch, and every part of it
  has them.

A tensor without dimensions, a ``PackedSequence``, a nested or a sparse tensor, and an object of a class of the user's
that is not a dataclass have no rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from apportion.core import tree
from apportion.core.loss_terms import Count, examples, terms_of
from apportion.core.order import Index
from apportion.core.sampler import DataShard, Draws, split


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
    first_draw: int | None = None
    """The number of draws of the epoch before this batch, where an example may come more than once in it; None where
    each comes once."""


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

    @property
    def draw_keys(self) -> Index:
        """What random numbers of each row are keyed by, besides the seed and the epoch: the example, or, where that may
        come more than once in an epoch, the number of the draw."""
        first = self._whole.first_draw
        if first is None:
            return self.index
        begin = first + self.rows.start
        return np.arange(begin, begin + len(self.index), dtype=np.int64)

    def draws(self) -> Draws:
        """Random numbers keyed by (seed, epoch, example): the same on any number of workers."""
        source = self._source
        return Draws(source.seed, self.epoch, self.draw_keys, device=source.device, dtype=source.dtype or torch.float32)

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


def row_count(inputs: Any, targets: Any, examples: int) -> int:
    """The number of rows of a batch that collate made of this many examples: what its targets show, or its inputs where
    the targets show nothing. ValueError, which names the leaf, where leaves disagree and none has a row for each
    example."""
    if isinstance(targets, Tensor) and targets.shape[:1] == (examples,):  # nearly every batch
        return examples
    shown, name, sizes = targets, "targets", list(_sizes(targets))
    if not sizes:
        shown, name, sizes = inputs, "inputs", list(_sizes(inputs))
    if not sizes:
        return examples
    misfit = misfit_of(shown, sizes[0], name)
    if examples in sizes:  # of a list of as many tensors the inputs tell whether these are entries or columns
        columns = misfit is None and sizes[0] != examples and misfit_of(inputs, sizes[0], "inputs") is None
        return sizes[0] if columns else examples
    if misfit is None:
        return examples if _lies_elsewhere((inputs, targets), examples) else sizes[0]
    raise ValueError(
        f"collate made {misfit} of {examples} examples, and {sizes[0]} rows elsewhere in {name}: the number of loss "
        "terms cannot be derived from it; state it with count=lambda targets: ..., or return a row for each example"
    )


def rows_of(value: Any, part: slice, rows: int | None = None, name: str = "inputs") -> Any:
    """A slice of the rows of a value that has ``rows`` of them (None: as many as its tensors agree on). ValueError,
    which names the leaf, where a leaf has another number of rows, or none."""
    if isinstance(value, Tensor) and rows is None and _is_dense(value):
        return value[part]
    many = next((n for n in _sizes(value) if misfit_of(value, n, name) is None), None) if rows is None else rows
    if many is None:
        many = next(_sizes(value), 0)
    if misfit := misfit_of(value, many, name):
        parts = f"parts of {many} rows" if many else "parts"
        raise ValueError(
            f"{misfit}, which cannot be cut into {parts}: where a batch is divided, dimension 0 of every tensor that "
            "collate returns must be the example"
        )
    return _cut(value, part, many)


def misfit_of(value: Any, rows: int, name: str) -> str | None:
    """The first leaf of a value that does not have this many rows, as the beginning of a sentence; None: all have."""
    for path, leaf in _leaves(value, rows, name):
        if isinstance(leaf, Tensor | np.ndarray):
            if not _is_dense(leaf):
                return f"{path} is {_kind(leaf)}"
            if leaf.shape[0] != rows:
                return f"{path} has {leaf.shape[0]} rows in place of {rows}"
        elif isinstance(leaf, PackedSequence) or any(True for _ in tree.tensors(leaf)):
            return f"{path} is a {type(leaf).__name__}"
    return None


def unjoined_leaf(value: Any, name: str) -> str | None:
    """The first leaf of a value whose rows cannot be put behind those of another rank, as the beginning of a sentence;
    None: all can."""
    if isinstance(value, Tensor):
        return None if _is_dense(value) else f"{name} is {_kind(value)}"
    if isinstance(value, list | tuple) and not _is_named(value):
        unlike = len({t.shape[:1] for t in tree.tensors(value)}) > 1
        if unlike or any(isinstance(each, str) for each in value):
            return f"{name} is a {type(value).__name__} of {len(value)} entries"
    children = _children(value)
    if children is None:
        held = isinstance(value, np.ndarray) or bool(tree.tensors(value))
        return f"{name} is a {type(value).__name__}" if held else None
    return next((found for path, inner in children if (found := unjoined_leaf(inner, name + path))), None)


def joined_structure(value: Any) -> str | None:
    """What values have in common whose rows can be put one after the other: the names of their leaves, with the types
    and the shapes of a row. None where that cannot be done leaf by leaf, as with lists of entries, and where one cannot
    tell entries from columns."""
    sizes = {int(t.shape[0]) if _is_dense(t) else -1 for t in tree.tensors(value)}
    if len(sizes) != 1 or -1 in sizes:
        return None
    described = _described(value, sizes.pop(), "")
    return None if described is None else "\n".join(described)


def _described(value: Any, rows: int, path: str) -> list[str] | None:
    if isinstance(value, Tensor):
        return [f"{path} {value.dtype} {tuple(value.shape[1:])}"]
    if value is None or type(value) in (bool, int, float, str):
        return [f"{path} {value!r}"]
    children = _children(value)
    if children is None:
        return None
    if isinstance(value, list | tuple) and (len(value) == rows or not all(map(tree.tensors, value))):
        return None
    found: list[str] = []
    for name, inner in children:
        described = _described(inner, rows, path + name)
        if described is None:
            return None
        found += described
    return found


def _leaves(value: Any, rows: int, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a value by their names in the program of the user. Lists with an entry a row are not entered: their
    entries have what shapes they like."""
    if isinstance(value, list | tuple) and not _is_named(value) and _is_entries(value, rows):
        return
    children = _children(value)
    if children is None:
        yield name, value
        return
    for path, inner in children:
        yield from _leaves(inner, rows, name + path)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What a value nests, by how it is written after the value's name; None for a leaf."""
    if isinstance(value, PackedSequence | Tensor):
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if _is_named(value):
        return [(f".{key}", getattr(value, key)) for key in value._fields]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", inner) for i, inner in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    return None


def _cut(value: Any, part: slice, rows: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[part]
    if isinstance(value, Mapping):
        return tree.mapping_like(value, {key: _cut(inner, part, rows) for key, inner in value.items()})
    if _is_named(value):
        return type(value)(*(_cut(inner, part, rows) for inner in value))
    if isinstance(value, list | tuple):
        entries = _is_entries(value, rows) or (len(value) == rows and not any(map(tree.tensors, value)))
        kept = value[part] if entries else [_cut(inner, part, rows) for inner in value]
        return kept if type(kept) is type(value) else type(value)(kept)
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in fields(value):
            object.__setattr__(copied, field.name, _cut(getattr(value, field.name, None), part, rows))
        return copied
    return value


def _sizes(value: Any) -> Iterator[int]:
    """The numbers of rows that the leaves of a value show, in its order."""
    if isinstance(value, Tensor | np.ndarray):
        if _is_dense(value):
            yield int(value.shape[0])
        return
    inner = [size for _, each in _children(value) or () for size in _sizes(each)]
    yield from inner
    if isinstance(value, list | tuple) and not _is_named(value):
        yield len(value)  # where these are entries


def _is_entries(value: list[Any] | tuple[Any, ...], rows: int) -> bool:
    """Tells whether a list that holds tensors has an entry for each row, and is not columns of this many rows each."""
    if len(value) != rows:
        return False
    found = tree.tensors(value)
    return bool(found) and any(not _is_dense(t) or t.shape[0] != rows for t in found)


def _lies_elsewhere(pair: Any, examples: int) -> bool:
    """Tells whether the examples lie in another dimension than the first, as where sequences lie time first."""
    dense = [t for t in tree.tensors(pair) if _is_dense(t)]
    return bool(dense) and all(examples in t.shape[1:] for t in dense)


def _is_dense(value: Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return value.layout is torch.strided and not value.is_nested and value.dim() > 0


def _kind(value: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    return "a tensor without rows"


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
