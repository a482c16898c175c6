"""Records what each DataLoader yields on this rank; shortens long ones; yields the rows of other ranks in a fed pass.

A loader is known by the line of the script that made it, and an iteration over it by its number, which are the same on
each rank and in one process. Loader processes are left as they are: the indices are drawn, and the batches handed out,
in the rank's own process, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import wraps
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loader

from apportion.script_check.feed import FedIteration
from apportion.script_check.recording import dispatching, samplers
from apportion.script_check.recording.batches import LARGEST_BATCH, recorded, restored, size
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.known_loaders import Loaders, length_of
from apportion.script_check.recording.precision import widened
from apportion.script_check.recording.recorder import Recorder


class _Shortened:
    """The first batches of a sampler and its last one, so that an epoch ends within the steps of a proof."""

    def __init__(self, sampler: Any, most: int) -> None:
        self._sampler, self._most = sampler, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        full = len(self._sampler)
        return self._most if full > 2 * self._most else full

    def __iter__(self) -> Iterator[Any]:
        batches = list(islice(self._sampler, len(self._sampler)))  # as some go on without an end
        yield from batches if len(batches) <= 2 * self._most else [*batches[: self._most - 1], batches[-1]]


def install(recorder: Recorder, constants: Constants) -> None:
    """Record, shorten and feed the loaders of torch."""
    loaders = Loaders(recorder, constants)
    begin = DataLoader.__init__

    @wraps(begin)
    def made(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if recorder.active:
            loaders.key(self)
            if recorder.feed is None:
                dispatching.install(loaders)

    DataLoader.__init__ = made  # type: ignore[method-assign]
    samplers.install(loaders)
    if recorder.feed is None:
        _shorten(int(recorder.plan["epoch_batches"]))
        _record(loaders)
    else:
        _feed(loaders)


def _shorten(most: int) -> None:
    sampler_of = DataLoader._index_sampler.fget  # type: ignore[attr-defined]

    def shortened(self: DataLoader[Any]) -> Any:
        sampler = sampler_of(self)
        sized = self.batch_sampler is not None and length_of(sampler) is not None
        return _Shortened(sampler, most) if most and sized else sampler

    DataLoader._index_sampler = property(shortened)  # type: ignore[assignment]


def _record(loaders: Loaders) -> None:
    """Records each iteration and each batch."""
    base: Any = torch_loader._BaseDataLoaderIter
    begin, next_index, next_batch = base.__init__, base._next_index, base.__next__
    recorder = loaders.recorder

    @wraps(begin)
    def begun(self: Any, loader: DataLoader[Any]) -> None:
        self._apportion_indices = deque()
        self._apportion_loader = loader
        begin(self, loader)
        _start(self, loader)

    def _start(self: Any, loader: DataLoader[Any]) -> None:
        if loader.__dict__.get("_apportion_dispatched"):
            self._apportion_place = ("", 0)
            return
        sampler = loader._index_sampler
        length = length_of(sampler)
        full = len(sampler._sampler) if isinstance(sampler, _Shortened) else length
        self._apportion_place = loaders.begin(loader, length, full)
        self._apportion_batch = 0

    reset = base._reset

    @wraps(reset)
    def again(self: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:  # persistent loader processes begin another epoch
            self._apportion_indices = deque()
            _start(self, loader)
        reset(self, loader, first_iter)

    @wraps(next_index)
    def drawn(self: Any) -> Any:
        index = next_index(self)
        self._apportion_indices.append(index)
        return index

    @wraps(next_batch)
    def handed(self: Any) -> Any:
        loader, iteration = self._apportion_place
        if self._apportion_loader.__dict__.get("_apportion_dispatched"):
            return next_batch(self)
        try:
            batch = next_batch(self)
        except StopIteration:
            recorder.emit("exhausted", loader=loader, iteration=iteration)
            raise
        indices = self._apportion_indices.popleft() if self._apportion_indices else None
        batch = widened(batch) if recorder.plan["float64"] else batch
        _emit(recorder, self, indices, batch)
        self._apportion_batch += 1
        return batch

    base.__init__, base._reset, base._next_index, base.__next__ = begun, again, drawn, handed


def _emit(recorder: Recorder, iterator: Any, indices: Any, batch: Any) -> None:
    """Records one batch: large ones by their indices alone."""
    loader, iteration = iterator._apportion_place
    mapped = iterator._dataset_kind == torch_loader._DatasetKind.Map
    recorder.emit(
        "batch",
        loader=loader,
        iteration=iteration,
        number=iterator._apportion_batch,
        indices=(list(indices) if isinstance(indices, list | tuple) else [indices]) if mapped else None,
        rows=None if mapped and size(batch) > LARGEST_BATCH else recorded(batch),
    )


def _feed(loaders: Loaders) -> None:
    """Yields what the ranks of another pass have read."""
    recorder = loaders.recorder
    iterate, length = DataLoader.__iter__, DataLoader.__len__

    @wraps(iterate)
    def fed(self: DataLoader[Any]) -> Any:
        key = loaders.key(self)
        iterations = recorder.feed.iterations.get(key, [])
        number = self.__dict__["_apportion_iterations"]
        if number >= len(iterations):
            return iterate(self)
        loaders.begin(self, iterations[number].length, iterations[number].length)
        return _Fed(recorder, self, key, number, iterations[number])

    @wraps(length)
    def fed_length(self: DataLoader[Any]) -> int:
        iterations = recorder.feed.iterations.get(loaders.key(self), [])
        found = iterations[0].length if iterations and not iterations[0].evaluation else None
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
            most: Any = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
            rows = fed.indices[0] or []
            self._indices: list[Any] = [rows[start : start + most] for start in range(0, len(rows), most)]
            self._batches: list[Any] = [None] * len(self._indices)
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
        tree, indices = self._batches[number], self._indices[number]
        if tree is not None:
            batch = restored(tree)
        else:
            assert self._loader.collate_fn is not None
            batch = self._loader.collate_fn([self._loader.dataset[index] for index in indices])
        batch = widened(batch) if self._recorder.plan["float64"] else batch
        self._recorder.emit(
            "batch",
            loader=loader,
            iteration=iteration,
            number=number,
            indices=indices,
            rows=None if size(batch) > LARGEST_BATCH else recorded(batch),
        )
        return batch
