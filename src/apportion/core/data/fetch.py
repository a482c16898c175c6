"""Rows of a dataset: opened, fetched, collated, moved and augmented."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.data.block import BatchPart, aligned
from apportion.core.rng import seed_host, seeded_rng
from apportion.core.sampler import Index, mix
from apportion.core.torch_private import in_own_memory
from apportion.core.workload import Workload


@final
class RowFetcher:
    """The dataset that ``make`` opens, and what becomes of its rows before a batch has them. ``augment``: whether they
    are augmented as the workload says."""

    def __init__(
        self,
        workload: Workload,
        make: Callable[[], Dataset[Any]],
        *,
        augment: bool,
        rank: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.seed, self.rank, self.dtype = workload.seed, rank, dtype
        self.augment, self._collate = workload.augment if augment else None, workload.collate
        self._make = make
        self.device = torch.device("cpu")
        """The device that the rows go to."""
        self.open()

    def open(self) -> None:
        """Open the dataset, for this process."""
        with seeded_rng(self.seed):
            self.dataset = self._make()
        # Indexing whole tensors gives what collating their rows gives, without a Python call an example.
        self.tensors: list[Tensor] | None = None
        if type(self.dataset) is TensorDataset and self._collate is default_collate:
            self.tensors = list(self.dataset.tensors)

    def gather(self, parts: list[BatchPart]) -> None:
        """Load the rows of several batches of a TensorDataset at once."""
        lengths = [len(part.index) for part in parts]
        tensors = self._rows(np.concatenate([part.index for part in parts]))
        inputs, targets = self._pair([[aligned(part) for part in t.split(lengths)] for t in tensors])
        for part, x, y, length in zip(parts, inputs, targets, lengths, strict=True):
            if length:
                part.loaded = (x, y)

    def _rows(self, index: Index) -> list[Tensor]:
        assert self.tensors is not None
        at = torch.from_numpy(np.ascontiguousarray(index))
        rows = [t.index_select(0, at.to(t.device)) for t in self.tensors]
        moved: list[Tensor] = tree.cast(rows, self.device, self.dtype)
        return moved

    def load(self, batch: Batch) -> tuple[Any, Any]:
        """Fetch, collate, move and augment the rows of a batch."""
        return self.augmented(batch, self.collated(batch))

    def collated(self, batch: Batch) -> tuple[Any, Any]:
        """Fetch, collate and move the rows of a batch."""
        if self.tensors is not None:
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
