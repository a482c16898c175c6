"""Records what each DataLoader yields on this rank; shortens long ones; yields the rows of other ranks in a fed pass.

A loader is known by the line of the script that made it, and an iteration over it by its number, which are the same on
each rank and in one process. Loader processes are left as they are: the indices are drawn, and the batches handed out,
in the rank's own process, in the same order. A ``BatchSampler`` that the script iterates over by itself is a loader
whose batches are lists of indices.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from functools import wraps
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Subset
from torch.utils.data import dataloader as torch_loader

from apportion.script_check.feed import FedIteration
from apportion.script_check.recording.batches import LARGEST_BATCH, MOST_ROWS, SHARE, recorded, restored, size
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.known_loaders import Loaders, length_of, whole
from apportion.script_check.recording.precision import widened
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.rows import joined


def _plain(indices: Any, dataset: Any) -> list[Any]:
    """Returns the indices of a batch in the data set that a Subset is taken from, those that are whole numbers of numpy
    or torch as numbers of Python."""
    found = list(indices) if isinstance(indices, list | tuple) else [indices]
    while type(dataset) is Subset:
        found = [dataset.indices[index] for index in found]
        dataset = dataset.dataset
    return [int(each) if hasattr(each, "__index__") else each for each in found]


# Records what accelerate's loaders give each rank.
#
# Its usual loader reads one batch ahead, so that the batch which the script has is not the one that was read last. Its
# dispatching loader reads on rank 0 alone, several batches for one step, and sends each rank its rows: what its own
# loader reads does not belong to any step, and the rows that come out of it are recorded in its place, under the name
# of its loader.


def install(recorder: Recorder, constants: Constants) -> None:
    """Record, shorten and feed the loaders of torch."""
    loaders = Loaders(recorder, constants)
    begin = DataLoader.__init__

    @wraps(begin)
    def made(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if recorder.active:
            loaders.key(self)
            install_accelerated(recorder)
            if recorder.feed is None:
                install_dispatcher(loaders)

    DataLoader.__init__ = made  # type: ignore[method-assign]
    _watch_batch_samplers(loaders)
    _shorten(int(recorder.plan["epoch_batches"]))
    if recorder.feed is None:
        _record_indices(loaders)
        _record_batches(recorder)
    else:
        _feed(loaders)


def _shorten(most: int) -> None:
    sampler_of = DataLoader._index_sampler.fget  # type: ignore[attr-defined]

    def shortened(self: DataLoader[Any]) -> Any:
        sampler = sampler_of(self)
        mapped = self._dataset_kind == torch_loader._DatasetKind.Map and self.batch_sampler is not None
        return Shortened(sampler, most) if most and mapped and length_of(sampler) is not None else sampler

    # On the class, where torch's iterators read it. They draw all indices in the rank's own process, also those of
    # loader processes.
    DataLoader._index_sampler = property(shortened)  # type: ignore[assignment]


def _start(loaders: Loaders, iterator: Any, loader: DataLoader[Any]) -> None:
    """Records that an iteration begins."""
    if loader.__dict__.get("_apportion_dispatched"):
        iterator._apportion_place = ("", 0)
        return
    sampler = loader._index_sampler
    length = length_of(sampler)
    full = sampler.full if isinstance(sampler, Shortened) else length
    seed = int(iterator._base_seed) if iterator._num_workers else None
    iterator._apportion_place = loaders.begin_iteration(loader, length, full, seed)
    iterator._apportion_batch = 0


def _record_indices(loaders: Loaders) -> None:
    """Records each iteration, and takes down the indices that samplers draw."""
    base: Any = torch_loader._BaseDataLoaderIter
    begin, reset, next_index = base.__init__, base._reset, base._next_index
    recorder = loaders.recorder

    @wraps(begin)
    def begun(self: Any, loader: DataLoader[Any]) -> None:
        self._apportion_indices = deque()
        self._apportion_loader = loader
        self._apportion_random = False
        before = recorder.draws
        begin(self, loader)
        # One draw is the seed of the loader processes; a sampler that makes its order at once draws in here, too.
        self._apportion_random = recorder.draws > before + 1
        _start(loaders, self, loader)

    @wraps(reset)
    def again(self: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:  # persistent loader processes begin another epoch
            self._apportion_indices = deque()
            self._apportion_random = False
            _start(loaders, self, loader)
        reset(self, loader, first_iter)

    @wraps(next_index)
    def drawn(self: Any) -> Any:
        before, outer, recorder.drawing = recorder.draws, recorder.drawing, "order"
        try:
            index = next_index(self)
        finally:
            recorder.drawing = outer
        self._apportion_random |= recorder.draws > before
        # Loader processes are given indices ahead of the batch that the script gets. Batches are handed out in the
        # order of their indices, so a queue pairs them.
        self._apportion_indices.append(index)
        return index

    base.__init__, base._reset, base._next_index = begun, again, drawn


def _record_batches(recorder: Recorder) -> None:
    """Records each batch as the script gets it, and the order of each epoch with its first batch."""
    base: Any = torch_loader._BaseDataLoaderIter
    next_batch = base.__next__

    @wraps(next_batch)
    def handed(self: Any) -> Any:
        loader, iteration = self._apportion_place
        if self._apportion_loader.__dict__.get("_apportion_dispatched"):
            return next_batch(self)
        before, recorder.drawing = recorder.draws, "rows"
        try:
            batch = next_batch(self)
        except StopIteration:
            recorder.emit("exhausted", loader=loader, iteration=iteration)
            raise
        finally:
            recorder.drawing = ""
        indices = self._apportion_indices.popleft() if self._apportion_indices else None
        wide = widened(batch) if recorder.plan["float64"] else batch
        _emit(recorder, self, indices, (batch, wide), recorder.draws > before)
        self._apportion_batch += 1
        return wide

    base.__next__ = handed


def _emit(recorder: Recorder, iterator: Any, indices: Any, batches: tuple[Any, Any], drew: bool) -> None:
    """Records one batch, as it was read and in float64. ``drew``: whether random numbers were drawn for it."""
    loader, iteration = iterator._apportion_place
    mapped = iterator._dataset_kind == torch_loader._DatasetKind.Map
    sampler, dataset = iterator._index_sampler, iterator._dataset
    if mapped and not iterator._apportion_batch and isinstance(sampler, Shortened) and sampler.order:
        order = [_plain(each, dataset) for each in sampler.order]
        recorder.emit("order", loader=loader, iteration=iteration, batches=order)
    rows = _contents(recorder, *batches, mapped)
    recorder.emit(
        "batch",
        loader=loader,
        iteration=iteration,
        number=iterator._apportion_batch,
        indices=_plain(indices, dataset) if mapped else None,
        rows=rows,
        left_out=rows is None,
        random=iterator._apportion_random or (not mapped and drew),
    )


def _contents(recorder: Recorder, batch: Any, wide: Any, mapped: bool) -> Any:
    """Returns what is recorded of a batch: large ones of a data set with indices as they were read, until ``MOST_ROWS``
    are, and those after them, and of evaluations, by their indices alone."""
    if not mapped or size(wide) <= LARGEST_BATCH:
        return recorded(wide)
    memory = int(recorder.plan["memory"]) // (SHARE * int(recorder.plan["ranks"])) or MOST_ROWS
    recorder.large_rows += size(batch) if torch.is_grad_enabled() else 0
    return recorded(batch) if torch.is_grad_enabled() and recorder.large_rows <= min(MOST_ROWS, memory) else None


def _feed(loaders: Loaders) -> None:
    """Yields what the ranks of another pass have read."""
    recorder, feed = loaders.recorder, loaders.recorder.feed
    assert feed is not None
    iterate, length = DataLoader.__iter__, DataLoader.__len__

    @wraps(iterate)
    def fed(self: DataLoader[Any]) -> Any:
        given = loaders.next_fed(self, length_of(self.dataset))
        if given is None:
            return iterate(self)
        key, number = loaders.begin_iteration(self, given.length, given.length)
        return _Fed(recorder, self, key, number, given)

    @wraps(length)
    def fed_length(self: DataLoader[Any]) -> int:
        given = loaders.first_fed(self, length_of(self.dataset))
        found = None if given is None or given.evaluation else given.length
        return length(self) if found is None else found

    DataLoader.__iter__ = fed  # type: ignore[method-assign]
    DataLoader.__len__ = fed_length  # type: ignore[method-assign]


class _Fed:
    """One iteration over a loader that yields the rows of all ranks."""

    def __init__(
        self, recorder: Recorder, loader: DataLoader[Any], key: str, iteration: int, fed: FedIteration
    ) -> None:
        self._recorder, self._loader, self._place, self._fed = recorder, loader, (key, iteration), fed
        self._number = 0
        if fed.evaluation:
            most = int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
            rows = (fed.indices[0] or []) if fed.indices else []
            self._indices: list[Any] = [rows[start : start + most] for start in range(0, len(rows), most)]
            self._batches: list[Any] = [None] * len(self._indices)
            if fed.batches:
                starts = range(0, len(fed.batches), most)
                self._batches = [joined(each := fed.batches[start : start + most], [1] * len(each)) for start in starts]
                self._indices = [None] * len(self._batches)
        else:
            self._indices, self._batches = list(fed.indices), list(fed.batches)

    def __iter__(self) -> _Fed:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        number, (loader, iteration) = self._number, self._place
        if number >= len(self._batches):
            self._recorder.emit("exhausted", loader=loader, iteration=iteration)
            raise StopIteration
        self._number += 1
        self._recorder.parts = self._fed.parts[number] if number < len(self._fed.parts) else []
        tree, indices = self._batches[number], self._indices[number]
        if tree is not None:
            batch = restored(tree)
        else:
            assert self._loader.collate_fn is not None
            rows = whole(self._loader.dataset)
            outer, self._recorder.drawing = self._recorder.drawing, "rows"
            try:
                batch = self._loader.collate_fn([rows[index] for index in indices])
            finally:
                self._recorder.drawing = outer
        batch = widened(batch) if self._recorder.plan["float64"] else batch
        self._recorder.emit(
            "batch",
            loader=loader,
            iteration=iteration,
            number=number,
            indices=indices,
            rows=None if size(batch) > LARGEST_BATCH else recorded(batch),
            random=False,
        )
        return batch


def _watch_batch_samplers(loaders: Loaders) -> None:
    """Watch torch's batch sampler where the script itself iterates over it."""
    recorder = loaders.recorder
    iterate = BatchSampler.__iter__

    @wraps(iterate)
    def watched(self: BatchSampler) -> Iterator[list[Any]]:
        if not recorder.is_user_file(sys._getframe(1).f_code.co_filename) or not recorder.active:
            return iterate(self)
        return (
            _fed_indices(loaders, self, iterate)
            if recorder.feed is not None
            else _recorded_indices(loaders, self, iterate(self))
        )

    BatchSampler.__iter__ = watched  # type: ignore[method-assign]


def _recorded_indices(loaders: Loaders, sampler: BatchSampler, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
    recorder = loaders.recorder
    key, iteration = loaders.begin_sampler_iteration(sampler)
    before = recorder.draws
    for number in count():
        outer, recorder.drawing = recorder.drawing, "order"
        try:
            indices = next(batches, None)
        finally:
            recorder.drawing = outer
        if indices is None:
            break
        recorder.emit(
            "batch",
            loader=key,
            iteration=iteration,
            number=number,
            indices=list(indices),
            rows=None,
            random=recorder.draws > before,
        )
        yield indices
    recorder.emit("exhausted", loader=key, iteration=iteration)


def _fed_indices(loaders: Loaders, sampler: BatchSampler, iterate: Any) -> Iterator[list[Any]]:
    given = loaders.next_fed(sampler, None)
    if given is None:
        return _recorded_indices(loaders, sampler, iterate(sampler))
    rows = given.indices
    if given.evaluation:
        read = rows[0] or []
        rows = [read[start : start + sampler.batch_size] for start in range(0, len(read), sampler.batch_size)]
    return _recorded_indices(loaders, sampler, iter([list(indices) for indices in rows if indices is not None]))


class Shortened:
    """The first batches of a sampler and its last one, so that an epoch ends within the steps of a proof.

    The number of batches has the same remainder by 4 as that of the whole epoch, so that accumulation over 2 or 4
    micro-batches ends in the same way.
    """

    def __init__(self, sampler: Any, most: int) -> None:
        self._sampler, self._most = sampler, most
        self.order = list[Any]()
        """The batches of the epoch, once it has begun; empty where the script's own sampler draws them one by one, as
        such a sampler may count those that it has drawn."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    @property
    def full(self) -> int:
        """The number of batches of the whole epoch."""
        return len(self._sampler)

    def __len__(self) -> int:
        return shortened_length(self.full, self._most)

    def __iter__(self) -> Iterator[Any]:
        if not _of_torch(self._sampler):
            yield from self._one_by_one()
            return
        batches = list(islice(self._sampler, len(self._sampler)))  # as some go on without an end
        length = shortened_length(len(batches), self._most)
        self.order = batches if length == len(batches) else [*batches[: length - 1], batches[-1]]
        yield from self.order

    def _one_by_one(self) -> Iterator[Any]:
        drawn, full = iter(self._sampler), self.full
        yield from islice(drawn, len(self) - 1)
        last = deque(islice(drawn, full - len(self) + 1), maxlen=1)
        yield from last
        next(drawn, None)  # what a sampler does at its end, such as counting epochs


def _of_torch(sampler: Any) -> bool:
    """Whether a sampler, and the one that it takes its rows from, are torch's own, which keep no count."""
    inner = getattr(sampler, "sampler", None)
    return all(type(each).__module__.startswith("torch.") for each in (sampler, inner) if each is not None)


def shortened_length(batches: int, most: int) -> int:
    """Returns the number of batches to which an epoch is shortened: at most ``most`` and 3."""
    return min(batches, most + batches % 4)


def install_accelerated(recorder: Recorder) -> None:
    """Records which batch the script has where accelerate's loader has read the next one already, and the gathers that
    drop the rows by which the last batches were filled."""
    module = sys.modules.get("accelerate.data_loader")
    shard = getattr(module, "DataLoaderShard", None)
    if shard is None or hasattr(shard, "_apportion_watched"):
        return
    shard._apportion_watched = True
    iterate = shard.__iter__

    @wraps(iterate)
    def handed(self: Any) -> Iterator[Any]:
        place: dict[str, Any] | None = None
        for position, batch in enumerate(iterate(self)):
            base = self.base_dataloader
            place = {"loader": base.__dict__["_apportion_key"], "iteration": base.__dict__["_apportion_iterations"] - 1}
            recorder.emit("taken", **place, number=position + self.skip_batches)
            yield batch
        if place is not None:
            recorder.emit("exhausted", **place)  # for the script, which has only now computed the last batch

    shard.__iter__ = handed
    accelerator: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is not None:
        gather = accelerator.gather_for_metrics

        @wraps(gather)
        def gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.emit("gather_for_metrics", site=recorder.site())
            return gather(self, *args, **kwargs)

        accelerator.gather_for_metrics = gathered


_MODULE, _CLASS = "accelerate.data_loader", "DataLoaderDispatcher"


def install_dispatcher(loaders: Loaders) -> None:
    """Watch the dispatching loader, if accelerate has been imported by now."""
    found = getattr(sys.modules.get(_MODULE), _CLASS, None)
    if found is None or "_apportion_watched" in vars(found):
        return
    found._apportion_watched = True
    iterate = found.__iter__

    @wraps(iterate)
    def watched(self: Any) -> Iterator[Any]:
        base = self.base_dataloader
        base.__dict__["_apportion_dispatched"] = True
        length = len(self) if hasattr(base.dataset, "__len__") else None
        key, iteration = loaders.begin_iteration(base, length, length)
        for number, batch in enumerate(iterate(self)):
            loaders.recorder.emit(
                "batch",
                loader=key,
                iteration=iteration,
                number=number,
                indices=None,
                rows=recorded(batch),
                random=False,
            )
            yield batch
        loaders.recorder.emit("exhausted", loader=key, iteration=iteration)

    found.__iter__ = watched
