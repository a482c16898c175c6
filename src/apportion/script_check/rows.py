"""Batches as trees of arrays, and the union of what several ranks have read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def joined(trees: Sequence[Any]) -> Any:
    """Returns the batch that has the rows of all batches, in order.

    Raises Unjoinable where the batches differ in structure or in another dimension than the first.
    """
    first = trees[0]
    if len({type(tree) for tree in trees}) != 1:
        raise Unjoinable("the ranks' batches have different types")
    if isinstance(first, Rows):
        return _joined_arrays(trees)
    if isinstance(first, Structure):
        if any((tree.module, tree.name) != (first.module, first.name) for tree in trees):
            raise Unjoinable("the ranks' batches have different types")
        return replace(first, parts=joined([tree.parts for tree in trees]))
    if isinstance(first, Mapping):
        if any(set(tree) != set(first) for tree in trees):
            raise Unjoinable("the ranks' batches have different keys")
        return {key: joined([tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple | list):
        return _joined_lists(trees)
    if any(tree != first for tree in trees):
        raise Unjoinable("a value of the batch differs between the ranks")
    return first


def _joined_arrays(rows: Sequence[Rows]) -> Rows:
    arrays = [each.values for each in rows]
    if not arrays[0].ndim:
        if any(not np.array_equal(array, arrays[0]) for array in arrays):
            raise Unjoinable("a number of the batch differs between the ranks")
        return rows[0]
    if len({array.shape[1:] for array in arrays}) != 1:
        raise Unjoinable("the ranks' batches have different shapes beyond the first dimension")
    return Rows(np.concatenate(arrays), rows[0].dtype)


def _joined_lists(trees: Sequence[Any]) -> Any:
    first = trees[0]
    if first and not any(
        isinstance(value, Rows | Structure | Mapping | tuple | list) for tree in trees for value in tree
    ):
        return type(first)(value for tree in trees for value in tree)  # a list with an entry a row
    if len({len(tree) for tree in trees}) != 1:
        raise Unjoinable("the ranks' batches have different numbers of parts")
    return type(first)(joined(parts) for parts in zip(*trees, strict=True))


def split(tree: Any) -> list[Any]:
    """Returns the rows of a batch, each as a batch of one row. Raises Unjoinable where its parts have unlike numbers of
    rows."""
    if isinstance(tree, Rows):
        if not tree.values.ndim:
            raise Unjoinable("a number of the batch belongs to no row")
        return [Rows(tree.values[row : row + 1], tree.dtype) for row in range(len(tree.values))]
    if isinstance(tree, Mapping):
        parts = [split(value) for value in tree.values()]
        return [dict(zip(tree, each, strict=True)) for each in _transposed(parts)]
    if isinstance(tree, Structure):
        return [replace(tree, parts=each) for each in split(tree.parts)]
    if isinstance(tree, tuple | list):
        if tree and not any(isinstance(value, Rows | Structure | Mapping | tuple | list) for value in tree):
            return [type(tree)([value]) for value in tree]
        return [type(tree)(each) for each in _transposed([split(value) for value in tree])]
    raise Unjoinable("a value of the batch belongs to no row")


def _transposed(parts: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if len({len(part) for part in parts}) != 1:
        raise Unjoinable("the parts of a batch have unlike numbers of rows")
    return list(zip(*parts, strict=True))


def count(tree: Any) -> int | None:
    """Returns the number of rows of a batch: the first dimension of its first tensor that has one."""
    if isinstance(tree, Rows):
        return len(tree.values) if tree.values.ndim else None
    if isinstance(tree, Structure):
        return count(tree.parts)
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return next((found for found in map(count, parts) if found is not None), None)


def turned(tree: Any, rows: int) -> Any:
    """Returns a batch of ``rows`` rows with them in the opposite order; what does not have as many stays."""
    if isinstance(tree, Rows):
        return replace(tree, values=tree.values[::-1].copy()) if tree.values.shape[:1] == (rows,) else tree
    if isinstance(tree, Structure):
        return replace(tree, parts=turned(tree.parts, rows))
    if isinstance(tree, Mapping):
        return {key: turned(value, rows) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        if len(tree) == rows and not any(isinstance(value, Rows | Structure | Mapping) for value in tree):
            return type(tree)(reversed(tree))
        return type(tree)(turned(value, rows) for value in tree)
    return tree
