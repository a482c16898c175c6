"""Batches: the examples a rank computes at a step, loaded when they are first touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from apportion.core import tree
from apportion.core.rng import seed_host, seeded_rng
from apportion.core.sampler import DataShard, Draws, Index, Sampler, mix, split
from apportion.core.torch_private import in_own_memory
from apportion.core.workload import Workload, checked, examples
from apportion.errors import ApportionError

if TYPE_CHECKING:
    from apportion.core.data.loader import Ahead

BLOCK_BYTES = 4 << 20
"""The approximate number of bytes up to which tensors are gathered for several batches at once: one gather then serves
many short steps."""


ALIGN = 64
"""The number of bytes that the address of a tensor's memory is a multiple of."""


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
        "_offset",
        "_request",
        "_source",
        "_whole",
        "epoch",
        "first_lane",
        "index",
        "rows",
        "size",
        "start",
        "step",
    )

    def __init__(self, source: BatchSource, whole: Whole, *, index: Index, rows: slice, first_lane: int = 0) -> None:
        self._source, self._whole = source, whole
        self._loaded: tuple[Any, Any] | None = None
        self._cut: tuple[Batch, slice] | None = None
        self._request: tuple[int, DataShard] | None = None
        self._offset = 0
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
        if count is None or count is examples:  # known without loading anything
            return float(len(self.index))
        return float(count(self.targets))

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            if not len(self.index):
                raise ValueError(f"{self} has no rows: there is nothing to load; see borrowed()")
            if self._cut is not None:
                whole, piece = self._cut
                inputs, targets = whole._load()
                self._loaded = (tree.rows(inputs, piece), tree.rows(targets, piece))
            else:
                self._loaded = self._source.load(self)
        return self._loaded

    def let_go(self) -> None:
        """Let go of inputs and targets, which are loaded again when they are touched again."""
        self._loaded = None

    def draws(self) -> Draws:
        """Random numbers keyed by (seed, epoch, example): the same on any number of workers."""
        source = self._source
        return Draws(source.seed, self.epoch, self.index, device=source.device, dtype=source.dtype or torch.float32)

    def replace(self, *, inputs: Any = None, targets: Any = None) -> Batch:
        """A batch of the same rows with other inputs or targets (what an ``augment`` returns)."""
        if inputs is None or targets is None:
            loaded = self._load()
            inputs, targets = loaded[0] if inputs is None else inputs, loaded[1] if targets is None else targets
        new = self._part(self.index, self.rows)
        new._loaded = (inputs, targets)
        return new

    def _part(self, index: Index, rows: slice) -> Batch:
        return Batch(self._source, self._whole, index=index, rows=rows, first_lane=self.first_lane)

    def parts(self, n: int) -> list[Batch]:
        """These rows in at most n micro-batches, in order; all are loaded when the first is touched: what collate
        and augment do does not depend on n."""
        if n == 1 or len(self.index) <= 1:
            return [self]
        pieces = []
        for piece in split(len(self.index), n):
            part = self._part(self.index[piece], slice(self.rows.start + piece.start, self.rows.start + piece.stop))
            part._cut = (self, piece)
            pieces.append(part)
        return pieces

    def by_itself(self) -> Batch:
        """The same rows as a global batch of their own, for ranks that together hold one of several replicas."""
        whole = self._whole._replace(size=len(self.index))
        batch = Batch(self._source, whole, index=self.index, rows=self.rows, first_lane=self.first_lane)
        batch._cut = (self, slice(0, len(self.index)))
        return batch

    def stream(self, most: int) -> Iterator[Batch]:
        """These rows in order, at most so many at once. Each part is loaded when it is touched and gone when it is let
        go: for what does not fit the memory at once. Collate and augment see one part at a time."""
        pieces = -(-len(self.index) // most)
        if self._loaded is not None or pieces <= 1:
            yield from self.parts(pieces)
            return
        for piece in split(len(self.index), pieces):
            part = self._part(self.index[piece], slice(self.rows.start + piece.start, self.rows.start + piece.stop))
            part._offset = piece.start
            yield part

    def borrowed(self) -> Batch:
        """One example of this global batch, for a rank that has none: computed with weight 0, so that it can take
        part in the collectives inside the model. A real one: where it gives a NaN, its owner's does too."""
        return self._part(np.array([self._whole.lender], dtype=np.int64), slice(self.rows.start, self.rows.start))


@dataclass(slots=True)
class _BatchPart:
    """One shard's rows of one batch."""

    whole: Whole
    index: Index
    rows: slice
    loaded: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class _Block:
    """One shard's rows of several consecutive batches, gathered at once."""

    shard: DataShard
    first: int
    parts: list[_BatchPart]

    def has(self, step: int, shard: DataShard) -> bool:
        return shard is self.shard and 0 <= step - self.first < len(self.parts)


def _aligned(rows: Tensor) -> Tensor:
    """The rows in memory that begins as a batch's by itself would: products of matrices round by where their numbers
    lie, and a block begins wherever a process has begun."""
    return rows if rows.data_ptr() % ALIGN == 0 else rows.clone()


class BatchSource:
    """Every batch of a training (or of one pass over an evaluation set), by step and share.

    ``device`` and ``dtype``: where the tensors go, and what floating ones become (None: as they are).
    """

    def __init__(
        self, workload: Workload, *, device: torch.device | None = None, dtype: torch.dtype | None = None, rank: int = 0
    ) -> None:
        self.seed, self.count, self._rank = workload.seed, workload.count, rank
        self._augment, self._collate = workload.augment, workload.collate
        self._open(workload.open_data)
        self.deal = Sampler(
            len(self.dataset),  # type: ignore[arg-type]
            workload.batch_size,
            order=workload.order,
            seed=workload.seed,
            lanes=workload.carry is not None,
        )
        self.total = workload.total_steps(self.deal.batches)
        self._to(device, dtype)

    @classmethod
    def of_evaluation(
        cls, workload: Workload, *, device: torch.device | None = None, dtype: torch.dtype | None = None, rank: int = 0
    ) -> BatchSource:
        """One pass over the evaluation set, in its order, not augmented."""
        evaluation = workload.evaluation
        assert evaluation is not None
        self = cls.__new__(cls)
        self.seed, self.count, self._rank = workload.seed, workload.count, rank
        self._augment, self._collate = None, workload.collate
        self._open(lambda: checked(evaluation.data(), "evaluation.data"))
        size = evaluation.batch_size or workload.batch_size
        lanes = workload.carry is not None
        self.deal = Sampler(len(self.dataset), size, order="sequential", seed=workload.seed, lanes=lanes)  # type: ignore[arg-type]
        self.total = self.deal.batches
        self._to(device, dtype)
        return self

    def _open(self, make: Callable[[], Dataset[Any]]) -> None:
        self._make = make
        with seeded_rng(self.seed):
            self.dataset = make()
        # Indexing whole tensors gives what collating their rows gives, without a Python call an example.
        self._tensors: list[Tensor] | None = None
        if type(self.dataset) is TensorDataset and self._collate is default_collate:
            self._tensors = list(self.dataset.tensors)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.seconds = 0.0
        """The seconds spent loading, or waiting for what loads, in all."""
        self._block: _Block | None = None
        self._ahead: Ahead | None = None

    def load_ahead(self, processes: int) -> None:
        """Have the coming batches loaded by so many child processes (0: by this process, when they are touched); the
        batches are the same. Each process opens the data for itself. Rows of a TensorDataset are only copied, which
        needs no such process. Where the batches go to a GPU, augment runs in this process, as it would without
        loaders."""
        self.close()
        if processes and (self._tensors is None or self._augment is not None):
            from apportion.core.data.loader import Ahead

            self._ahead = Ahead(processes, begin=self._begin, load=self._load_share, following=self._following)

    def start_over(self) -> None:
        """Forget what was loaded ahead."""
        if self._ahead is not None:
            self._ahead.start_over()

    def close(self) -> None:
        """End the loading processes."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __len__(self) -> int:
        return self.total

    def at(self, step: int, shard: DataShard = DataShard()) -> Batch:  # noqa: B008 (frozen)
        """This shard's rows of step's batch."""
        block = self._block
        if block is None or not block.has(step, shard):
            self._block = None  # gone before the next one is gathered
            block = self._block = self._next_block(step, shard)
        part = block.parts[step - block.first]
        first_lane = shard.rows(self.deal.batch_size).start if self.deal.lanes else 0
        batch = Batch(self, part.whole, index=part.index, rows=part.rows, first_lane=first_lane)
        batch._loaded = part.loaded
        if self._ahead is not None:
            batch._request = (step, shard)
        return batch

    def sample(self, rows: int) -> tuple[Any, Any]:
        """Inputs and targets of the first rows of the first batch, loaded by themselves, not to be trained on."""
        found = self._part(0, DataShard())
        index = found.index[:rows]
        batch = Batch(self, found.whole, index=index, rows=slice(0, len(index)))
        seconds = self.seconds
        try:
            return self._load(batch)
        finally:
            self.seconds = seconds

    def _next_block(self, step: int, shard: DataShard) -> _Block:
        """The block that begins at this step, within its epoch: as many batches as are worth gathering at once, or this
        one, which is then loaded when it is touched."""
        first = self._part(step, shard)
        if self._tensors is None or self._ahead is not None or shard.whole_batches or self._augment is not None:
            return _Block(shard, step, [first])
        began = time.perf_counter()
        row_bytes = sum(t[0].numel() * t.element_size() for t in self._tensors)
        many = BLOCK_BYTES // max(1, row_bytes * len(first.index))
        end = min((step // self.deal.batches + 1) * self.deal.batches, step + many)
        parts = [first, *(self._part(number, shard) for number in range(step + 1, end))]
        if len(parts) > 1:
            self._gather(parts)
        self.seconds += time.perf_counter() - began
        return _Block(shard, step, parts)

    def _part(self, step: int, shard: DataShard) -> _BatchPart:
        deal = self.deal
        step, rows = deal.shard(step, shard)
        index = deal.index(step)
        epoch, place = divmod(step, deal.batches)
        return _BatchPart(Whole(step, epoch, len(index), place == 0, int(index[0])), index[rows], rows)

    def _gather(self, parts: list[_BatchPart]) -> None:
        lengths = [len(part.index) for part in parts]
        tensors = self._rows(np.concatenate([part.index for part in parts]))
        inputs, targets = self._pair([[_aligned(part) for part in t.split(lengths)] for t in tensors])
        for part, x, y, length in zip(parts, inputs, targets, lengths, strict=True):
            if length:
                part.loaded = (x, y)

    def _rows(self, index: Index) -> list[Tensor]:
        assert self._tensors is not None
        at = torch.from_numpy(np.ascontiguousarray(index))
        rows = [t.index_select(0, at.to(t.device)) for t in self._tensors]
        moved: list[Tensor] = tree.cast(rows, self.device, self.dtype)
        return moved

    def load(self, batch: Batch) -> tuple[Any, Any]:
        """Fetch, collate, move and augment the rows of a batch."""
        began = time.perf_counter()
        try:
            return self._load(batch) if batch._request is None else self._load_from(batch)
        finally:
            self.seconds += time.perf_counter() - began

    def _load(self, batch: Batch) -> tuple[Any, Any]:
        return self._augmented(batch, self._collated(batch))

    def _collated(self, batch: Batch) -> tuple[Any, Any]:
        if self._tensors is not None:
            return self._pair(self._rows(batch.index))
        index = batch.index.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        with self._draws_of(batch, 0xF37C):
            samples = many(index) if many is not None else [self._example(batch.epoch, i) for i in index]
            with nullcontext() if get_worker_info() is None else in_own_memory():
                collated = self._collate(samples)
        return self._pair(tree.cast(collated, self.device, self.dtype))

    def _example(self, epoch: int, i: int) -> Any:
        """One example, whose draws are its own: the same whichever rank fetches it, and beside whichever other
        examples."""
        seed_host(mix(self.seed, epoch, i, 0xE7A1))
        return self.dataset[i]

    def _augmented(self, batch: Batch, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        if self._augment is None:
            return pair
        batch._loaded = pair
        with self._draws_of(batch, 0xA06E):
            changed = self._augment(batch, batch.draws())
        return tree.cast((changed.inputs, changed.targets), self.device, self.dtype)  # type: ignore[no-any-return]

    def _draws_of(self, batch: Batch, key: int) -> AbstractContextManager[None]:
        """Make what the data draws from the global generators a function of the step, which can be repeated."""
        place = (batch._offset,) if batch._offset else ()  # parts that are loaded apart draw apart
        return seeded_rng(mix(self.seed, batch.step, self._rank, key, *place))

    def sit(self, rank: int) -> None:
        """Let this process have another rank."""
        self._rank = rank

    # With loading processes

    def _load_from(self, batch: Batch) -> tuple[Any, Any]:
        """The inputs and targets that a loader has made of the batch."""
        from apportion.core.data.loader import LoadFailed

        if self._ahead is None:
            return self._load(batch)
        found = self._ahead.take(batch._request)
        if isinstance(found, LoadFailed):
            self._load(batch)  # raises the same again, with the traceback of its own
            raise ApportionError(f"a data-loading process failed: {found.summary}\n{found.traceback}")
        pair = tree.cast(found, self.device, None)
        return pair if self.device.type == "cpu" else self._augmented(batch, pair)

    def _begin(self) -> None:
        """Open the data in a loading process, for itself."""
        self._ahead, self._loads_for = None, self.device
        self.device = torch.device("cpu")
        self._open(self._make)

    def _load_share(self, request: tuple[int, DataShard]) -> tuple[Any, Any]:
        batch = self.at(*request)
        pair = self._collated(batch)
        return self._augmented(batch, pair) if self._loads_for.type == "cpu" else pair

    def _following(self, request: tuple[int, DataShard]) -> Iterator[tuple[int, DataShard]]:
        """The requests for this share of a step, and of those after it; steps where the share has no rows, which are
        not loaded, are left out."""
        first, shard = request
        for number in range(first, max(self.total, first + 1)):
            _, rows = self.deal.shard(number, shard)
            if rows.stop > rows.start:
                yield number, shard

    def _pair(self, collated: Any) -> tuple[Any, Any]:
        if isinstance(collated, tuple | list) and len(collated) == 2:
            return collated[0], collated[1]
        what = (
            f"{type(collated).__name__} of {len(collated)}"
            if isinstance(collated, tuple | list | dict)
            else type(collated).__name__
        )
        raise ValueError(
            f"collate gave a {what}; a batch is (inputs, targets): make each item of the dataset a pair, "
            "or give collate=lambda samples: (inputs, targets)"
        )
