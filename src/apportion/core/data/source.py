"""The source of all batches: which rows of which global batch a share takes, loaded here or by other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch, BatchPart, Block, Whole, aligned
from apportion.core.loss_terms import Count, LabelTerms, examples, resolved
from apportion.core.order import Index, Order
from apportion.core.parts import PartedDataset, PartRows
from apportion.core.python_state.python_state import PythonState
from apportion.core.rng import mix, seed_host, seeded_rng
from apportion.core.sampler import DataShard, PartSampler, Sampler
from apportion.core.torch_private import in_own_memory
from apportion.core.workload import Workload, checked
from apportion.errors import ApportionError

if TYPE_CHECKING:
    from apportion.core.data.loader import Ahead

BLOCK_BYTES = 4 << 20
"""The approximate number of bytes up to which tensors are gathered for several batches at once: one gather then serves
many short steps."""


class BatchSource:
    """Every batch of a training (or of one pass over an evaluation set), by step and share.

    ``device`` and ``dtype``: where the tensors go, and what floating ones become (None: as they are).
    """

    def __init__(
        self,
        workload: Workload,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        dataset: PartedDataset | None = None,
    ) -> None:
        """Opens the data set, all of it; ``dataset``: those parts of it that this rank has, and the lengths of all."""
        self._fetcher = RowFetcher(workload, workload.open_data, augment=True, rank=rank, dtype=dtype, dataset=dataset)
        self.deal = _sampler(workload, self.dataset)
        self.total = workload.total_steps(self.deal.batches)
        self._to(workload, device)

    @classmethod
    def of_evaluation(
        cls, workload: Workload, *, device: torch.device | None = None, dtype: torch.dtype | None = None, rank: int = 0
    ) -> BatchSource:
        """One pass over the evaluation set, in its order, not augmented."""
        evaluation = workload.evaluation
        assert evaluation is not None
        self = cls.__new__(cls)
        make = lambda: checked(evaluation.data(), "evaluation.data()")  # noqa: E731
        self._fetcher = RowFetcher(workload, make, augment=False, rank=rank, dtype=dtype)
        size = evaluation.batch_size or workload.batch_size
        lanes = workload.carry is not None
        self.deal = Sampler(len(self.dataset), size, order="sequential", seed=workload.seed, lanes=lanes)  # type: ignore[arg-type]
        self.total = self.deal.batches
        self._to(workload, device)
        return self

    def _to(self, workload: Workload, device: torch.device | None) -> None:
        self.seed, self.dtype = workload.seed, self._fetcher.dtype
        self._workload = workload
        self._python: PythonState | None = None
        self._is_looking = False
        self.count = self._fetcher.counted(workload.terms)
        """The number of loss terms in some targets, or ``examples`` where each of these rows is seen to have one."""
        self.keeps_rows = self._fetcher.keeps_rows
        self.device = self._fetcher.device = device or torch.device("cpu")
        self.seconds = 0.0
        """The seconds spent loading, or waiting for what loads, in all."""
        self._block: Block | None = None
        self._ahead: Ahead | None = None

    def count_for(self, model: nn.Module) -> None:
        """Take the number of loss terms from this model, where it computes the loss by itself."""
        self.count = self._fetcher.counted(resolved(self.count, model))

    def load_ahead(self, processes: int) -> None:
        """Have the coming batches loaded by this many child processes (0: by this process, when they are touched); the
        batches are the same. Each process opens the data for itself. Rows of a TensorDataset are only copied, which
        needs no such process. Where the batches go to a GPU, augment runs in this process, as it would without
        loaders."""
        self.close()
        if processes and isinstance(self.dataset, ActedDataset):
            raise ValueError(
                f"loaders={processes}: the network makes these examples as it is at each step: use loaders=0"
            )
        if processes and (not self._fetcher.indexed or self._fetcher.augment is not None):
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

    @property
    def dataset(self) -> Dataset[Any]:
        """The dataset that the rows are of."""
        return self._fetcher.dataset

    def acts(self, network: nn.Module) -> None:
        """Have the examples made by this network, where the network makes them: from then on this process computes with
        one thread. An example takes hundreds of calls of microseconds, in which several threads mostly wait for each
        other; on busy cores they take up to a hundred times as long."""
        if isinstance(self.dataset, ActedDataset):
            self.dataset.network, self.dataset.seed = network, self.seed
            torch.set_num_threads(1)

    def must_act(self, step: object) -> None:
        """Raise ValueError where the network is to make the examples, and the strategy has not said which network."""
        if isinstance(self.dataset, ActedDataset) and self.dataset.network is None:
            raise ValueError(
                f"{type(step).__name__} cannot train on what its network does: no worker has a whole network that "
                "acts; use single_device, data_parallel, parameter_server or hogwild"
            )

    def act_as(self, worker: int) -> None:
        """Have the examples made that this worker makes, where the network makes them and each worker has its own."""
        if isinstance(self.dataset, ActedDataset):
            self.dataset.worker = worker

    def set_rank(self, rank: int) -> None:
        """Let this process have another rank."""
        self._fetcher.rank = rank

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
        return Batch(
            self,
            part.whole,
            index=part.index,
            rows=part.rows,
            first_lane=first_lane,
            loaded=part.loaded,
            request=None if self._ahead is None else (step, shard),
        )

    def rows(self, step: int, part: slice) -> Batch:
        """These rows of the global batch of a step, which this process loads by itself when they are touched."""
        index = self.deal.index(step)
        epoch, place = self.deal.place(step)
        whole = Whole(step, epoch, self.deal.size(step), place == 0, int(index[0]), self.deal.first_draw(step))
        return Batch(self, whole, index=index[part], rows=part)

    def sample(self, rows: int) -> tuple[Any, Any]:
        """Inputs and targets of the first rows of the first batch, loaded by themselves, not to be trained on; of the
        parts that are opened here, where there are parts. What loading them changes in the data set is put back."""
        with self.looking():
            return self.first_rows(rows)

    def first_rows(self, rows: int) -> tuple[Any, Any]:
        """Inputs and targets of the first rows of the first batch, loaded by themselves; what loading them changes in
        the data set stays changed."""
        deal, dataset = self.deal, self.dataset
        if isinstance(deal, PartSampler) and isinstance(dataset, PartedDataset):
            index = deal.first_rows(dataset.opened, rows)
        else:
            index = deal.index(0)[:rows]
        whole = Whole(0, 0, deal.size(0), True, int(index[0]), deal.first_draw(0))
        batch = Batch(self, whole, index=index, rows=slice(0, len(index)))
        seconds = self.seconds
        try:
            return self._fetcher.load(batch)
        finally:
            self.seconds = seconds

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A context in which rows are loaded, and the loss is called, for a look and not for training. What the data
        set, collate, augment and the loss change in it, as a private generator that draws or a number that counts, is
        put back, so that the first step finds what it would without."""
        if self._is_looking:
            yield
            return
        if self._python is None:
            self._python = self._watched()
        self._python.settle()
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False
            self._python.reset()
            self._fetcher.forget_epoch()

    def _watched(self) -> PythonState:
        workload = self._workload
        found = PythonState(workload.caches)
        copied = self._fetcher.indexed and self._fetcher.augment is None  # nothing of the user's runs for a row
        data = None if copied else self.dataset
        found.watch(data=data, **{name: getattr(workload, name) for name in ("loss", "collate", "augment", "count")})
        return found

    def _next_block(self, step: int, shard: DataShard) -> Block:
        """The block that begins at this step, within its epoch: as many batches as are worth gathering at once, or this
        one, which is then loaded when it is touched."""
        first = self._part(step, shard)
        if (
            not self._fetcher.indexed
            or self._ahead is not None
            or shard.whole_batches
            or self._fetcher.augment is not None
        ):
            return Block(shard, step, [first])
        began = time.perf_counter()
        many = BLOCK_BYTES // max(1, self._fetcher.row_bytes * len(first.index))
        end = min((step // self.deal.batches + 1) * self.deal.batches, step + many)
        parts = [first, *(self._part(number, shard) for number in range(step + 1, end))]
        if len(parts) > 1:
            self._fetcher.gather(parts)
        self.seconds += time.perf_counter() - began
        return Block(shard, step, parts)

    def _part(self, step: int, shard: DataShard) -> BatchPart:
        step, index, rows, lender = self.deal.take(step, shard)
        epoch, place = self.deal.place(step)
        whole = Whole(step, epoch, self.deal.size(step), place == 0, lender, self.deal.first_draw(step))
        return BatchPart(whole, index, rows)

    def load(self, batch: Batch) -> tuple[Any, Any]:
        """Fetch, collate, move and augment the rows of a batch."""
        began = time.perf_counter()
        try:
            return self._fetcher.load(batch) if batch.request is None else self._load_from(batch)
        finally:
            self.seconds += time.perf_counter() - began

    # With loading processes

    def _load_from(self, batch: Batch) -> tuple[Any, Any]:
        """The inputs and targets that a loader has made of the batch."""
        from apportion.core.data.loader import LoadFailed

        if self._ahead is None:
            return self._fetcher.load(batch)
        found = self._ahead.take(batch.request)
        if isinstance(found, LoadFailed):
            self._fetcher.load(batch)  # raises the same again, with the traceback of its own
            raise ApportionError(f"a data-loading process failed: {found.summary}\n{found.traceback}")
        pair = tree.cast(found, self.device, None)
        return pair if self.device.type == "cpu" else self._fetcher.augmented(batch, pair)

    def _begin(self) -> None:
        """Open the data in a loading process, for itself."""
        self._ahead, self._loads_for = None, self.device
        self.device = self._fetcher.device = torch.device("cpu")
        self._fetcher.open_again()

    def _load_share(self, request: tuple[int, DataShard]) -> tuple[Any, Any]:
        batch = self.at(*request)
        pair = self._fetcher.collated(batch)
        return self._fetcher.augmented(batch, pair) if self._loads_for.type == "cpu" else pair

    def _following(self, request: tuple[int, DataShard]) -> Iterator[tuple[int, DataShard]]:
        """The requests for this share of a step, and of those after it; steps where the share has no rows, which are
        not loaded, are left out."""
        first, shard = request
        for number in range(first, max(self.total, first + 1)):
            _, rows = self.deal.shard(number, shard)
            if rows.stop > rows.start:
                yield number, shard


def _sampler(workload: Workload, dataset: Dataset[Any]) -> Sampler:
    """The order in which the examples of a training set are taken."""
    size, order, seed, drop_last = workload.update_size, workload.order, workload.seed, workload.drop_last
    if isinstance(dataset, PartedDataset):
        return PartSampler(dataset.lengths, size, order=order, seed=seed, drop_last=drop_last)
    if isinstance(order, Order):
        if isinstance(dataset, ActedDataset):
            raise ValueError(
                f"order={order}: the network makes these examples, one for each actor, and they are taken in turn: "
                "leave order out"
            )
        with seeded_rng(seed):  # a data set may draw where its rows are read
            order = order.opened(dataset)
    lanes = workload.carry is not None
    return Sampler(len(dataset), size, order=order, seed=seed, lanes=lanes, drop_last=drop_last)  # type: ignore[arg-type]


# Rows of a dataset: opened, fetched, collated, moved and augmented.


@final
class RowFetcher:
    """The dataset that ``make`` opens, and what becomes of its rows before a batch has them. ``augment``: whether they
    are augmented as the workload says; ``dataset``: the parts of it that are opened already."""

    def __init__(
        self,
        workload: Workload,
        make: Callable[[], Dataset[Any]],
        *,
        augment: bool,
        rank: int,
        dtype: torch.dtype | None,
        dataset: PartedDataset | None = None,
    ) -> None:
        self.seed, self.rank, self.dtype = workload.seed, rank, dtype
        self.augment, self._collate = workload.augment if augment else None, workload.collate
        self._trains = augment
        self._epochs: dict[int, int] = {}
        """The epoch that each data set was last given."""
        self._make = make
        self.device = torch.device("cpu")
        """The device that the rows go to."""
        self.indexed = False
        """True where rows are indexed in whole tensors, which gives what collating them gives, without a Python call an
        example."""
        self.row_bytes = 0
        """The bytes of a row in those tensors."""
        if dataset is not None:
            self.dataset: Dataset[Any] = dataset
        else:
            self._open()
        self.keeps_rows = self._collate is default_collate and self.augment is None
        """True where a batch has a row for each of its examples, whatever they are. The same on every rank."""
        opened = [self.dataset]
        if isinstance(self.dataset, PartedDataset):
            opened = [self.dataset.open(part) for part in self.dataset.opened]
        if self._collate is default_collate and opened and all(type(data) is TensorDataset for data in opened):
            self.indexed, tensors = True, cast(TensorDataset, opened[0]).tensors
            self.row_bytes = sum(t[0].numel() * t.element_size() for t in tensors)

    def counted(self, count: Count | None) -> Count | None:
        """Returns ``examples`` in the place of a derived count where whole tensors show that each row has as many loss
        terms as every other: what all rows of a batch have is then known without asking the other ranks."""
        if not isinstance(count, LabelTerms) or not self.indexed or self.augment is not None:
            return count
        if type(self.dataset) is not TensorDataset or len(self.dataset.tensors) != 2:  # of parts a rank has some alone
            return count
        return examples if count.one_each(self.dataset.tensors[1]) else count

    def _open(self) -> None:
        with seeded_rng(self.seed):
            self.dataset = self._make()

    def open_again(self) -> None:
        """Open the dataset once more, for a process that was forked from one that has it open; parts of it as rows of
        them are asked for."""
        if isinstance(self.dataset, PartedDataset):
            self.dataset = self.dataset.closed()
        else:
            self._open()

    def gather(self, parts: list[BatchPart]) -> None:
        """Load the rows of several batches of a TensorDataset at once."""
        lengths = [len(part.index) for part in parts]
        tensors = self._rows(np.concatenate([part.index for part in parts]))
        if tensors is None:
            return
        inputs, targets = self._pair([[aligned(part) for part in t.split(lengths)] for t in tensors])
        for part, x, y, length in zip(parts, inputs, targets, lengths, strict=True):
            if length:
                part.loaded = (x, y)

    def _pieces(self, index: Index) -> Iterable[PartRows]:
        """The rows with these indices, by the data sets that they are in."""
        if isinstance(self.dataset, PartedDataset):
            return self.dataset.pieces(index)
        return (PartRows(self.dataset, index, index),)

    def _rows(self, index: Index) -> list[Tensor] | None:
        """The rows of whole tensors; None where it turns out that a part has none."""
        found = []
        for piece in self._pieces(index):
            if type(piece.data) is not TensorDataset:
                self.indexed = False
                return None
            at = torch.from_numpy(np.ascontiguousarray(piece.local))
            found.append([t.index_select(0, at.to(t.device)) for t in piece.data.tensors])
        rows = found[0] if len(found) == 1 else [_joined(pieces) for pieces in zip(*found, strict=True)]
        moved: list[Tensor] = tree.cast(rows, self.device, self.dtype)
        return moved

    def load(self, batch: Batch) -> tuple[Any, Any]:
        """Fetch, collate, move and augment the rows of a batch."""
        return self.augmented(batch, self.collated(batch))

    def collated(self, batch: Batch) -> tuple[Any, Any]:
        """Fetch, collate and move the rows of a batch."""
        if isinstance(self.dataset, ActedDataset):
            return self._pair(tree.cast(self.dataset.act(batch.index, batch.step), self.device, self.dtype))
        rows = self._rows(batch.index) if self.indexed else None
        if rows is not None:
            return self._pair(rows)
        with self._draws_of(batch, 0xF37C):
            pieces, keys = [], batch.draw_keys
            for piece in self._pieces(batch.index):
                self._tell_epoch(piece.data, batch.epoch)
                pieces.append(self._samples(batch.epoch, piece, piece.whole if keys is batch.index else keys))
            samples = pieces[0] if len(pieces) == 1 else [sample for piece in pieces for sample in piece]
            with nullcontext() if get_worker_info() is None else in_own_memory():
                collated = self._collate(samples)
        return self._pair(tree.cast(collated, self.device, self.dtype))

    def _tell_epoch(self, data: Dataset[Any], epoch: int) -> None:
        """Call ``set_epoch`` of a training set that has it, before the first rows of another epoch are read."""
        if not self._trains or self._epochs.get(id(data)) == epoch:
            return
        set_epoch = getattr(data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        self._epochs[id(data)] = epoch

    def forget_epoch(self) -> None:
        """Call ``set_epoch`` again before the next rows are read: what it has set was put back."""
        self._epochs.clear()

    def _samples(self, epoch: int, piece: PartRows, keys: Index) -> Any:
        many = getattr(piece.data, "__getitems__", None)
        if many is not None:
            samples = many(piece.local.tolist())
            if self.keeps_rows and len(samples) != len(piece.local):
                raise ValueError(
                    f"{type(piece.data).__name__}.__getitems__ gave {len(samples)} examples for {len(piece.local)} "
                    "indices: it must give one for each; leave examples out in collate"
                )
            return samples
        at = zip(piece.local.tolist(), piece.whole.tolist(), keys.tolist(), strict=True)
        return [self._example(epoch, piece.data, local, i, key) for local, i, key in at]

    def _example(self, epoch: int, data: Dataset[Any], local: int, i: int, key: int) -> Any:
        """One example, whose draws are its own: the same whichever rank fetches it, and beside whichever other
        examples."""
        seed_host(mix(self.seed, epoch, key, 0xE7A1))
        try:
            return data[local]
        except Exception as error:
            error.add_note(f"{type(data).__name__}.__getitem__ raised this for example {i}, in epoch {epoch}")
            raise

    def augmented(self, batch: Batch, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """Augment the inputs and targets of a batch, where the workload augments."""
        if self.augment is None:
            return pair
        batch.hold(*pair)
        with self._draws_of(batch, 0xA06E):
            changed = self.augment(batch, batch.draws())
        return tree.cast((changed.inputs, changed.targets), self.device, self.dtype)  # type: ignore[no-any-return]

    def _draws_of(self, batch: Batch, key: int) -> AbstractContextManager[None]:
        """Make what the data draws from the global generators a function of the step, which can be repeated."""
        place = (batch.offset,) if batch.offset else ()  # parts that are loaded apart draw apart
        return seeded_rng(mix(self.seed, batch.step, self.rank, key, *place))

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


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Rows of several parts, one after the other. ValueError where they are of different shapes or types."""
    kinds = {f"{tuple(piece.shape[1:])} {piece.dtype}" for piece in pieces}
    if len(kinds) > 1:
        raise ValueError(
            f"the parts of the data set have rows of different shapes or types, {' and '.join(sorted(kinds))}: all "
            "parts must be alike"
        )
    return torch.cat([*pieces])
