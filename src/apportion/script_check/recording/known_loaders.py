"""The loaders that a script has made, each known by the line that made it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np
from torch.utils.data import DataLoader, Subset

from apportion.script_check.feed import FedIteration
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.orders import order_of
from apportion.script_check.recording.recorder import Recorder


class Loaders:
    """The loaders of this rank, in the order in which the script makes them."""

    def __init__(self, recorder: Recorder, constants: Constants) -> None:
        self.recorder, self._constants = recorder, constants
        self._made = dict[str, int]()
        self._data_sets = list[ref[Any]]()
        self._fed = set[str]()

    def key(self, loader: Any) -> str:
        """Returns by what name a loader, or a sampler that is used as one, is known."""
        known = loader.__dict__.get("_apportion_key")
        if known is None:
            site = self.recorder.site()
            self._made[site] = number = self._made.get(site, 0) + 1
            known = site if number == 1 else f"{site} ({number})"
            loader.__dict__["_apportion_key"] = known
            loader.__dict__["_apportion_iterations"] = 0
            loader.__dict__["_apportion_made"] = self.recorder.step
        return str(known)

    def fed(self, loader: Any, rows: int | None) -> Sequence[FedIteration]:
        """Returns what a loader, or a sampler that is used as one, yields in a fed pass. One that the script makes at
        another line as one process, or that a framework makes there on ranks alone, is given what the ranks have read
        of the first loader over as many ``rows`` that has no other to take its place."""
        feed, key = self.recorder.feed, self.key(loader)
        iterations: Mapping[str, Sequence[FedIteration]] = {} if feed is None else feed.iterations
        if key not in iterations and key not in self._fed:
            made = {f"{site} ({number})" if number > 1 else site for site, number in self._numbered()}
            others = (k for k, each in iterations.items() if k not in self._fed | made and each[0].rows == rows)
            key = loader.__dict__["_apportion_key"] = next(others, key)
        self._fed.add(key)
        return iterations.get(key, [])

    def _numbered(self) -> Iterator[tuple[str, int]]:
        """The lines of the loaders made so far, with the number of each among those of its line, from 1."""
        return ((site, number) for site, count in self._made.items() for number in range(1, count + 1))

    def begin(
        self, loader: DataLoader[Any], length: int | None, full: int | None, seed: int | None = None
    ) -> tuple[str, int]:
        """Record that an iteration begins; returns the loader's name and the iteration's number, from 0. ``seed``: that
        of its loader processes."""
        return self._begin(
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

    def begin_sampler(self, sampler: Any) -> tuple[str, int]:
        """The same for a batch sampler that the script reads by itself, a loader whose batches are lists of indices."""
        length = len(sampler)
        return self._begin(
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

    def _begin(self, loader: Any, **fields: Any) -> tuple[str, int]:
        self._constants.has_loader = True  # what the script computes with needs no other record
        key = self.key(loader)
        number = loader.__dict__["_apportion_iterations"]
        loader.__dict__["_apportion_iterations"] = number + 1
        made = loader.__dict__["_apportion_made"]
        self.recorder.emit("iteration", loader=key, number=number, made=made, site=self.recorder.site(), **fields)
        return key, number

    def _data_set(self, dataset: Any) -> int | None:
        """Returns by which number this object is known; None where it cannot be told from one that is made later."""
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
    """A digest of the rows that a Subset selects, in their order; None where the data set is none."""
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
