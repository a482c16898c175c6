"""Rows of a dataset: opened, fetched, collated, moved and augmented."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch, BatchPart, aligned
from apportion.core.loss_terms import Count, LabelTerms, examples
from apportion.core.parts import PartedDataset, PartRows
from apportion.core.rng import seed_host, seeded_rng
from apportion.core.sampler import Index, mix
from apportion.core.torch_private import in_own_memory
from apportion.core.workload import Workload


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
            pieces = [self._samples(batch.epoch, piece) for piece in self._pieces(batch.index)]
            samples = pieces[0] if len(pieces) == 1 else [sample for piece in pieces for sample in piece]
            with nullcontext() if get_worker_info() is None else in_own_memory():
                collated = self._collate(samples)
        return self._pair(tree.cast(collated, self.device, self.dtype))

    def _samples(self, epoch: int, piece: PartRows) -> Any:
        many = getattr(piece.data, "__getitems__", None)
        if many is not None:
            samples = many(piece.local.tolist())
            if self.keeps_rows and len(samples) != len(piece.local):
                raise ValueError(
                    f"{type(piece.data).__name__}.__getitems__ gave {len(samples)} examples for {len(piece.local)} "
                    "indices: it must give one for each; leave examples out in collate"
                )
            return samples
        at = zip(piece.local.tolist(), piece.whole.tolist(), strict=True)
        return [self._example(epoch, piece.data, local, i) for local, i in at]

    def _example(self, epoch: int, data: Dataset[Any], local: int, i: int) -> Any:
        """One example, whose draws are its own: the same whichever rank fetches it, and beside whichever other
        examples."""
        seed_host(mix(self.seed, epoch, i, 0xE7A1))
        return data[local]

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
