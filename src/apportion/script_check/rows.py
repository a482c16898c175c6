"""Batches as trees of arrays, and the union of what several ranks have read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rows:
    """A tensor of a batch: its values, rows in dimension 0, and the name of its element type in torch."""

    values: np.ndarray[Any, Any]
    dtype: str


@dataclass(frozen=True)
class Structure:
    """An object of a class of the script or of a library. ``module``, ``name``: of the class; ``parts``: its fields in
    order, or what it maps to what. ``kind``: how it is made again, "fields" of a named tuple, the "mapping", or the
    "attributes" of any other object."""

    module: str
    name: str
    kind: str
    parts: Mapping[Any, Any]


class Unjoinable(ValueError):
    """Batches whose rows cannot be joined along dimension 0."""


def joined(trees: Sequence[Any], rows: Sequence[int] | None = None, *, loosely: bool = True) -> Any:
    """Returns the batch that has the rows of all batches, in order.

    ``rows``: the number of rows of each batch, which distinguishes lists with an entry for each row from lists of
    parts; without it, lists of tensors and of other lists are taken for parts. ``loosely``: whether tensors whose first
    dimension is another one are joined all the same, if they do not hold the places of rows in their batch.

    Raises Unjoinable where the batches differ in structure or in another dimension than the first.
    """
    first = trees[0]
    if len({type(tree) for tree in trees}) != 1:
        raise Unjoinable("the ranks' batches have different types")
    if rows is not None and not _have_rows(trees, rows):
        if not loosely:
            raise Unjoinable("a tensor of the batch does not have a value for each row")
        if any(_counts_rows(array, n) for tree, n in zip(trees, rows, strict=True) for array in arrays_of(tree, n)):
            raise Unjoinable("a tensor of the batch holds the places of its rows")
    return _joined(first, trees, rows)


def _joined(first: Any, trees: Sequence[Any], rows: Sequence[int] | None) -> Any:
    if isinstance(first, Rows):
        return _joined_arrays(trees)
    if isinstance(first, Structure):
        if any((tree.module, tree.name) != (first.module, first.name) for tree in trees):
            raise Unjoinable("the ranks' batches have different types")
        return replace(first, parts=joined([tree.parts for tree in trees], rows))
    if isinstance(first, Mapping):
        if any(set(tree) != set(first) for tree in trees):
            raise Unjoinable("the ranks' batches have different keys")
        return {key: joined([tree[key] for tree in trees], rows) for key in first}
    if isinstance(first, tuple | list):
        return _joined_lists(trees, rows)
    if any(tree != first for tree in trees):
        raise Unjoinable("a value of the batch differs between the ranks")
    return first


def _have_rows(trees: Sequence[Any], rows: Sequence[int]) -> bool:
    """Whether the tensors of each batch, but for those in lists with an entry for each row, have its rows as their
    first dimension, or all of them another one, such as two views of each row."""
    for tree, count in zip(trees, rows, strict=True):
        sizes = {len(array) for array in arrays_of(tree, count) if array.ndim}
        if len(sizes) > 1:
            return False
    return True


def _counts_rows(array: np.ndarray[Any, Any], rows: int) -> bool:
    """Whether a tensor, or its first column, says to which of the rows of a batch each of its values belongs: whole
    numbers from 0 that grow."""
    if not array.ndim or array.ndim > 2 or not array.size or len(array) == rows or array.dtype.kind not in "iuf":
        return False
    column = array if array.ndim == 1 else array[:, 0]
    return bool(
        column[0] >= 0 and 0 < column[-1] < rows and np.all(np.diff(column) >= 0) and np.all(column == np.floor(column))
    )


def arrays_of(tree: Any, rows: int | None = None) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the arrays of a tree; without those in lists with an entry for each of its ``rows`` rows."""
    if isinstance(tree, Rows):
        yield tree.values
    elif isinstance(tree, Structure):
        yield from arrays_of(tree.parts, rows)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from arrays_of(value, rows)
    elif isinstance(tree, tuple | list) and (rows is None or not have_entries([tree], [rows])):
        for value in tree:
            yield from arrays_of(value, rows)


def have_entries(trees: Sequence[Any], rows: Sequence[int]) -> bool:
    """Returns whether lists have an entry for each row of their batches: as many as it has rows, of one kind. Two
    tensors of two rows each are two parts of a batch of two."""
    if any(len(tree) != count for tree, count in zip(trees, rows, strict=True)):
        return False
    if len({_kind(value) for tree in trees for value in tree}) != 1:
        return False
    return any(
        not isinstance(value, Rows | Structure | Mapping | tuple | list)
        or any(array.shape[:1] != (count,) for array in arrays_of(value))
        for tree, count in zip(trees, rows, strict=True)
        for value in tree
    )


def _kind(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.values.ndim, value.dtype
    if isinstance(value, Structure):
        return value.module, value.name
    if isinstance(value, Mapping):
        return frozenset(value)
    return type(value) if isinstance(value, tuple | list) else None


def _joined_arrays(rows: Sequence[Rows]) -> Rows:
    arrays = [each.values for each in rows]
    if not arrays[0].ndim:
        if any(not np.array_equal(array, arrays[0]) for array in arrays):
            raise Unjoinable("a number of the batch differs between the ranks")
        return rows[0]
    if len({array.shape[1:] for array in arrays}) != 1:
        raise Unjoinable("the ranks' batches have different shapes beyond the first dimension")
    return Rows(np.concatenate(arrays), rows[0].dtype)


def _joined_lists(trees: Sequence[Any], rows: Sequence[int] | None) -> Any:
    first = trees[0]
    plain = first and not any(
        isinstance(value, Rows | Structure | Mapping | tuple | list) for tree in trees for value in tree
    )
    if plain or (rows is not None and first and have_entries(trees, rows)):
        return type(first)(value for tree in trees for value in tree)  # a list with an entry a row
    if len({len(tree) for tree in trees}) != 1:
        raise Unjoinable("the ranks' batches have different numbers of parts")
    return type(first)(joined(parts, rows) for parts in zip(*trees, strict=True))


def split(tree: Any, rows: int | None = None) -> list[Any]:
    """Returns the rows of a batch, each as a batch of one row. ``rows``: how many it has, where it is known. Raises
    Unjoinable where its parts have unlike numbers of rows."""
    if isinstance(tree, Rows):
        if not tree.values.ndim:
            raise Unjoinable("a number of the batch belongs to no row")
        return [Rows(tree.values[row : row + 1], tree.dtype) for row in range(len(tree.values))]
    if isinstance(tree, Mapping):
        parts = [split(value, rows) for value in tree.values()]
        return [dict(zip(tree, each, strict=True)) for each in _transposed(parts)]
    if isinstance(tree, Structure):
        return [replace(tree, parts=each) for each in split(tree.parts, rows)]
    if isinstance(tree, tuple | list):
        plain = tree and not any(isinstance(value, Rows | Structure | Mapping | tuple | list) for value in tree)
        if plain or (rows and have_entries([tree], [rows])):
            return [type(tree)([value]) for value in tree]
        return [type(tree)(each) for each in _transposed([split(value, rows) for value in tree])]
    raise Unjoinable("a value of the batch belongs to no row")


def _transposed(parts: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if len({len(part) for part in parts}) != 1:
        raise Unjoinable("the parts of a batch have unlike numbers of rows")
    return list(zip(*parts, strict=True))


def count(tree: Any, rows: int | None = None) -> int | None:
    """Returns the number of rows of a batch: the first dimension of its first tensor that has one, or ``rows`` where a
    list with an entry for each of them comes first."""
    if isinstance(tree, Rows):
        return len(tree.values) if tree.values.ndim else None
    if isinstance(tree, Structure):
        return count(tree.parts, rows)
    if rows and isinstance(tree, tuple | list) and have_entries([tree], [rows]):
        return rows
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return next((found for found in (count(part, rows) for part in parts) if found is not None), None)


def reversed_rows(tree: Any, rows: int) -> Any:
    """Returns a batch of ``rows`` rows with them in the opposite order; what does not have as many stays."""
    if isinstance(tree, Rows):
        return replace(tree, values=tree.values[::-1].copy()) if tree.values.shape[:1] == (rows,) else tree
    if isinstance(tree, Structure):
        return replace(tree, parts=reversed_rows(tree.parts, rows))
    if isinstance(tree, Mapping):
        return {key: reversed_rows(value, rows) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        if have_entries([tree], [rows]):
            return type(tree)(reversed(tree))
        return type(tree)(reversed_rows(value, rows) for value in tree)
    return tree
