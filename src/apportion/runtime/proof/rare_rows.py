"""The rows of a data set that few others are like: each value of a label, ignored or missing labels, the shortest and
the longest sequence, the emptiest and the fullest mask, the smallest and the largest weight.

A mistake that such a row alone shows is found where the rows of a proof have one. Targets that are whole tensors are
read at once; others row by row, in an order that is drawn, for as long as there is time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from apportion.core.data.acted import ActedDataset
from apportion.core.parts import PartedDataset
from apportion.core.torch_private import pytree

MOST = 256
"""The number of rows that are named at most, the rarest first."""
VALUES = 4096
"""The number of values of a label up to which each has a row."""
MOST_ELEMENTS = 1 << 22
"""The number of labels, of which a row has several, up to which their values are distinguished."""
BLOCK_ROWS = 64
"""The number of rows whose elements are counted at once."""
LEAST = 32
"""The number of rows that are read whatever the time."""
_AGREE = 4
"""The number of rows that are read to see that an attribute of the data set has its labels."""


@dataclass(frozen=True)
class RareRows:
    """The rows that few others are like."""

    rows: tuple[int, ...]
    """Their indices, the rarest first."""
    read: int
    """The number of rows whose targets were read."""
    of: int
    """The number of rows of the data set."""


def rare_rows(data: Dataset[Any], seconds: float) -> RareRows:
    """Finds the rare rows of a map-style data set within about ``seconds`` seconds."""
    count: int = len(data)  # type: ignore[arg-type]
    if isinstance(data, ActedDataset):  # its rows are made by the network, and cannot be chosen
        return RareRows((), 0, count)
    if isinstance(data, PartedDataset):
        return _of_parts(data, seconds)
    until = time.monotonic() + seconds
    found = _Found()
    whole = _tensors(data)
    if whole is not None:
        for place, tensor in enumerate(whole):
            found.take_whole(place, tensor, target=place > 0 or len(whole) == 1)
        return RareRows(found.rows(), count, count)
    labels = _labels(data, count)
    if labels is not None:
        found.take_whole(-1, labels, target=True)
    read = 0
    for index in _order(count):
        if read >= LEAST and time.monotonic() > until:
            break
        found.add_row(index, data[index])
        read += 1
    return RareRows(found.rows(), count if labels is not None else read, count)


def _of_parts(data: PartedDataset, seconds: float) -> RareRows:
    """Finds the rare rows of each part, all of which can be opened here; the rarest of every part come first."""
    found = [rare_rows(data.open(part), seconds / data.parts) for part in range(data.parts)]
    rows = [[data.first_row(part) + row for row in one.rows] for part, one in enumerate(found)]
    turns = [row for turn in itertools.zip_longest(*rows) for row in turn if row is not None]
    return RareRows(tuple(turns[:MOST]), sum(one.read for one in found), sum(one.of for one in found))


@dataclass
class _Kind:
    """Rows that have something in common."""

    row: int
    count: int
    first: int = 1
    """The place of the kind among others: a lower one is taken first."""


@dataclass
class _Found:
    """What the rows read so far have shown."""

    kinds: dict[Any, _Kind] = field(default_factory=dict)
    least: dict[Any, tuple[float, int]] = field(default_factory=dict)
    most: dict[Any, tuple[float, int]] = field(default_factory=dict)

    def rows(self) -> tuple[int, ...]:
        extremes = [
            kept[name][1]
            for name in self.least
            if self.least[name][0] != self.most[name][0]
            for kept in (self.least, self.most)
        ]
        kinds = sorted(self.kinds.values(), key=lambda kind: (kind.first, kind.count, kind.row))
        ignored = [kind.row for kind in kinds if kind.first == 0]
        return tuple(dict.fromkeys([*ignored, *extremes, *(kind.row for kind in kinds)]))[:MOST]

    def take_whole(self, place: int, tensor: Tensor, *, target: bool) -> None:
        """Takes one tensor of all rows."""
        if tensor.dim() == 0 or not len(tensor):
            return
        if not tensor.is_floating_point() and not tensor.is_complex():
            self._whole_numbers(place, tensor, target=target)
        elif target and tensor.is_floating_point():
            self._whole_reals(place, tensor.detach())

    def _whole_reals(self, place: int, tensor: Tensor) -> None:
        """Takes measures, weights, a mask or numbered labels of all rows; a label may be missing, as NaN."""
        flat = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
        if bool((missing := flat.isnan()).any()):
            self._extremes((place, "missing"), missing.sum(1))
            rows = missing.any(1)
            self._add((place, "missing"), int(rows.nonzero()[0]), int(rows.sum()), first=0)
            flat = flat.nan_to_num(0.0)
        if flat.shape[1]:
            self._extremes((place, "size"), flat[:, 0] if tensor.dim() == 1 else flat.abs().amax(1))
            self._extremes((place, "some"), _counts(flat, lambda rows: rows != 0))
        if tensor.numel() <= MOST_ELEMENTS and bool((flat == flat.round()).all()):
            self._values(place, flat)

    def _whole_numbers(self, place: int, tensor: Tensor, *, target: bool) -> None:
        if tensor.dim() > 1:  # labels, tokens or a mask, of which a row may have more than another
            flat = tensor.flatten(1)
            self._extremes((place, "some"), _counts(flat, lambda rows: rows > 0))
            negative = _counts(flat, lambda rows: rows < 0) if target else torch.zeros(1)
            if bool(negative.any()):
                self._extremes((place, "ignored"), negative)
                self._add((place, "ignored"), int(negative.nonzero()[0]), int((negative > 0).sum()), first=0)
        if target and (tensor.dim() == 1 or tensor.numel() <= MOST_ELEMENTS):
            self._values(place, tensor)

    def _values(self, place: int, tensor: Tensor) -> None:
        values, places, counts = np.unique(tensor.cpu().numpy(), return_index=True, return_counts=True)
        each, real = max(1, tensor[0].numel()), tensor.is_floating_point()
        if len(values) <= VALUES:
            for value, where, count in zip(values.tolist(), places.tolist(), counts.tolist(), strict=True):
                self._add((place, value), where // each, count, first=0 if value < 0 and not real else 1)

    def _extremes(self, name: Any, sizes: Tensor) -> None:
        for kept, which in ((self.least, sizes.min(0)), (self.most, sizes.max(0))):
            kept[name] = float(which.values), int(which.indices)

    def add_row(self, index: int, example: Any) -> None:
        """Adds one row."""
        pair = isinstance(example, tuple | list) and len(example) == 2
        for part, value in enumerate(example if pair else (example,)):
            for place, leaf in enumerate(pytree.tree_leaves(value)):
                self._leaf((part, place), index, _as_tensor(leaf), target=part == 1 or not pair)

    def _leaf(self, place: Any, index: int, leaf: Tensor | None, *, target: bool) -> None:
        if leaf is None or leaf.is_complex():
            return
        if leaf.dim():
            self._measure((place, "length"), index, float(leaf.shape[0]))
        if leaf.is_floating_point():
            if target and leaf.numel():
                self._reals(place, index, leaf)
            return
        if leaf.dim():
            self._measure((place, "some"), index, float((leaf > 0).sum()))
            if target and (below := int((leaf < 0).sum())):
                self._measure((place, "ignored"), index, float(below))
        if target and len(self.kinds) < VALUES:
            for value in {*leaf.flatten().tolist()}:
                self._add((place, value), index, 1, first=0 if value < 0 else 1)

    def _reals(self, place: Any, index: int, leaf: Tensor) -> None:
        if bool((missing := leaf.isnan()).any()):
            self._measure((place, "missing"), index, float(missing.sum()))
            self._add((place, "missing"), index, 1, first=0)
            leaf = leaf.nan_to_num(0.0)
        self._measure((place, "size"), index, float(leaf if leaf.dim() == 0 else leaf.abs().max()))
        if leaf.dim():
            self._measure((place, "some"), index, float((leaf != 0).sum()))
        if len(self.kinds) < VALUES and bool((leaf == leaf.round()).all()):
            for value in {*leaf.flatten().tolist()}:
                self._add((place, value), index, 1, first=1)

    def _measure(self, name: Any, index: int, size: float) -> None:
        if name not in self.least or size < self.least[name][0]:
            self.least[name] = size, index
        if name not in self.most or size > self.most[name][0]:
            self.most[name] = size, index

    def _add(self, name: Any, row: int, count: int, *, first: int) -> None:
        kind = self.kinds.setdefault(name, _Kind(row, 0, first))
        kind.count += count


def _counts(flat: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns, for each row, the number of elements of which something holds. A few rows at a time: what is made of
    them stays in the cache, which takes a seventh of the time for the pixels of 50,000 images."""
    return torch.cat([holds(rows).sum(1, dtype=torch.int32) for rows in flat.split(BLOCK_ROWS)])


def _as_tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biuf":
        return torch.as_tensor(leaf)
    return torch.tensor(leaf) if isinstance(leaf, bool | int | float) else None


def _tensors(data: Any) -> list[Tensor] | None:
    """Returns the tensors of all rows of a TensorDataset, or of some rows of one; None for other data sets."""
    if type(data) is TensorDataset:
        return list(data.tensors)
    if type(data) is Subset and (whole := _tensors(data.dataset)) is not None:
        chosen = torch.as_tensor(list(data.indices))
        return [t[chosen.to(t.device)] for t in whole]
    return None


def _labels(data: Any, count: int) -> Tensor | None:
    """Returns the labels that a data set keeps in an attribute, as those of torchvision do, where some of its rows show
    that they are what it gives."""
    for name in ("targets", "labels"):
        try:
            found = torch.as_tensor(getattr(data, name))
            if found.is_floating_point() or found.dim() != 1 or len(found) != count:
                continue
            shown = [int(data[i][1]) == int(found[i]) for i in _first(_order(count), _AGREE)]
        except Exception:  # it has no such attribute, or another use for it
            continue
        if all(shown):
            return found
    return None


def _first(order: Iterator[int], count: int) -> Iterator[int]:
    yield from (index for index, _ in zip(order, range(count), strict=False))


def _order(count: int) -> Iterator[int]:
    """Yields all rows in an order that is drawn."""
    yield from torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
