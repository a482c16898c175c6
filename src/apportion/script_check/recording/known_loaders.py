"""The loaders that a script has made, each known by the line that made it, with the order and the distribution of rows
that their samplers declare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler
from torch.utils.data.sampler import WeightedRandomSampler

from apportion.script_check.feed import FedIteration
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.recorder import Recorder


class Loaders:
    """The loaders of this rank, in the order in which the script makes them."""

    def __init__(self, recorder: Recorder, constants: Constants) -> None:
        self.recorder, self._constants = recorder, constants
        self._made = dict[str, int]()
        self._begun = dict[str, int]()
        """The number of iterations that have begun over each loader, by its name."""
        self._claims = dict[str, str]()
        """The line of this script whose loaders yield what a loader of the ranks has read, by the name of that one: the
        line that makes one of this name, or one that makes another in its place."""
        self._data_sets = list[ref[Any]]()

    def key(self, loader: Any) -> str:
        """Returns the name of a loader, or of a sampler that is used as one."""
        known = loader.__dict__.get("_apportion_key")
        if known is None:
            site = self.recorder.site()
            self._made[site] = number = self._made.get(site, 0) + 1
            known = site if number == 1 else f"{site} ({number})"
            self._claims.setdefault(known, site)
            loader.__dict__["_apportion_key"] = known
            loader.__dict__["_apportion_line"] = site
            loader.__dict__["_apportion_made"] = self.recorder.step
        return str(known)

    def first_fed(self, loader: Any, rows: int | None) -> FedIteration | None:
        """Returns what the first iteration over a loader yields in a fed pass; None where the loader reads by itself.
        ``rows``: the length of its data set."""
        return next(iter(self._iterations.get(self._claimed(loader, rows), ())), None)

    def next_fed(self, loader: Any, rows: int | None) -> FedIteration | None:
        """Returns what the iteration over a loader that now begins yields in a fed pass; None where the loader reads by
        itself. ``rows``: the length of its data set."""
        key = self._claimed(loader, rows)
        if not self._unread(key):
            key = self._claim(loader, rows)
        return self._iterations[key][self._begun.get(key, 0)] if self._unread(key) else None

    @property
    def _iterations(self) -> Mapping[str, Sequence[FedIteration]]:
        return {} if self.recorder.feed is None else self.recorder.feed.iterations

    def _unread(self, key: str) -> bool:
        """Whether the ranks have made more iterations over a loader than have begun here."""
        return self._begun.get(key, 0) < len(self._iterations.get(key, ()))

    def _claimed(self, loader: Any, rows: int | None) -> str:
        key = self.key(loader)
        return key if key in self._iterations else self._claim(loader, rows)

    def _claim(self, loader: Any, rows: int | None) -> str:
        """Gives a loader the name of one of the ranks' over as many rows, of which iterations are left: the first one
        that no loader has here, or one whose place a loader of the same line has taken before. A script may make its
        loaders at other lines as one process, or as one process once and on ranks anew for each epoch."""
        key, line = self.key(loader), loader.__dict__["_apportion_line"]
        left = [name for name, each in self._iterations.items() if self._unread(name) and each[0].rows == rows]
        free = [name for name in left if name not in self._claims]
        own = [name for name in left if self._claims.get(name) == line]
        key = next(iter((*free, *own)), key)
        self._claims[key] = line
        loader.__dict__["_apportion_key"] = key
        return key

    def begin_iteration(
        self, loader: DataLoader[Any], length: int | None, full: int | None, seed: int | None = None
    ) -> tuple[str, int]:
        """Record that an iteration begins; returns the loader's name and the iteration's number, from 0. ``seed``: that
        of its loader processes."""
        return self._record_iteration(
            loader,
            length=length,
            full=full,
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            rows=length_of(loader.dataset),
            worker_seed=seed,
            subset=type(loader.dataset) is Subset,
            selection=_selection(loader.dataset),
            data_set=self._data_set(whole(loader.dataset)),
            **order_of(loader),
        )

    def begin_sampler_iteration(self, sampler: Any) -> tuple[str, int]:
        """The same for a batch sampler that the script reads by itself, a loader whose batches are lists of indices."""
        length = len(sampler)
        return self._record_iteration(
            sampler,
            length=length,
            full=length,
            batch_size=sampler.batch_size,
            rows=None,
            worker_seed=None,
            subset=False,
            selection=None,
            data_set=None,
            **order_of(sampler),
        )

    def _record_iteration(self, loader: Any, **fields: Any) -> tuple[str, int]:
        self._constants.has_loader = True  # what the script computes with needs no other record
        key = self.key(loader)
        number = self._begun.get(key, 0)
        self._begun[key] = loader.__dict__["_apportion_iterations"] = number + 1
        made = loader.__dict__["_apportion_made"]
        self.recorder.emit("iteration", loader=key, number=number, made=made, site=self.recorder.site(), **fields)
        return key, number

    def _data_set(self, dataset: Any) -> int | None:
        """Returns the number of a data set; None for one of a type without weak references, which is not numbered."""
        with suppress(TypeError):  # lists and tuples have no weak references
            number = next((at for at, known in enumerate(self._data_sets) if known() is dataset), None)
            if number is None:
                number = len(self._data_sets)
                self._data_sets.append(ref(dataset))
            return number
        return None


def whole(dataset: Any) -> Any:
    """Returns the data set that a Subset is taken from."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _selection(dataset: Any) -> str | None:
    """A digest of the rows that a Subset selects, in their order; None for other data sets."""
    if type(dataset) is not Subset:
        return None
    found = hashlib.blake2b(digest_size=8)
    while type(dataset) is Subset:
        found.update(np.asarray(dataset.indices).tobytes())
        dataset = dataset.dataset
    return found.hexdigest()


def length_of(sized: Any) -> int | None:
    """Returns the length of a data set or sampler; None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # such as the sampler of an iterable data set
        return None


_DEEPEST = 8


def order_of(loader: DataLoader[Any] | BatchSampler) -> dict[str, Any]:
    """Returns the fields of an event ``iteration`` on order and distribution, of a loader or of a batch sampler that
    the script reads by itself.

    ``sampler``: the type that makes the order. ``shuffles``: whether it declares that it shuffles, None where it does
    not say. ``replicas``: into how many parts it divides the rows, None where it does not. ``replacement``: whether it
    draws rows with replacement. ``pads``: whether it repeats rows until the last batches are whole.
    ``epochs``: whether it, or the data set, has ``set_epoch``.
    """
    chain = list(_chain(loader))
    innermost = chain[-1]
    holders = (*chain, getattr(loader, "dataset", None))
    replicas = [
        value
        for each in chain
        for value in (getattr(each, "num_replicas", None), getattr(each, "num_processes", None))
        if isinstance(value, int) and value > 1
    ]
    return {
        "sampler": type(innermost).__name__,
        "shuffles": _shuffles(innermost),
        "replicas": replicas[0] if replicas else None,
        "replacement": isinstance(innermost, WeightedRandomSampler) or bool(getattr(innermost, "replacement", False)),
        "pads": any(hasattr(each, "even_batches") or hasattr(each, "split_batches") for each in holders),
        "epochs": any(hasattr(each, "set_epoch") for each in holders),
    }


def _chain(loader: DataLoader[Any] | BatchSampler) -> Any:
    """The samplers of a loader, from the one that it calls to the one that makes the order."""
    each: Any = loader
    if isinstance(loader, DataLoader):
        each = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(_DEEPEST):
        yield each
        inner = getattr(each, "batch_sampler", None)
        inner = getattr(each, "sampler", None) if inner is None else inner
        if inner is None or inner is each or not hasattr(inner, "__iter__"):
            return
        each = inner


def _shuffles(sampler: Any) -> bool | None:
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return True
    if isinstance(sampler, SequentialSampler | BatchSampler):
        return False
    declared = getattr(sampler, "shuffle", None)
    return declared if isinstance(declared, bool) else None
