"""The values of single rows in the batches that were recorded, and whether a row has the same values in two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from apportion.script_check.comparison.reading import Iteration
from apportion.script_check.rows import Rows, Structure, arrays_of

Array = np.ndarray[Any, Any]
Column = Sequence[Any] | Array
"""One value for each row of a batch: an array, or the list of arrays of an entry of a list."""


def random_values(iterations: Sequence[Iteration]) -> bool:
    """Returns whether a row has other values when it is read again, in parts of batches that have one for each row."""
    batches = [batch for iteration in iterations for batch in iteration.batches if batch.indexed]
    found = [columns(batch.values, len(batch.rows)) for batch in batches]
    always = [place for place in (found[0] if found else ()) if all(place in each for each in found)]
    seen = dict[tuple[str, object], object]()
    return any(
        not same_values(seen.setdefault((place, row), value), value)
        for batch, parts in zip(batches, found, strict=True)
        for place in always
        for row, value in zip(batch.rows, parts[place], strict=True)
    )


def columns(tree: Any, rows: int) -> dict[str, Column]:
    """Returns, by their place in a batch of ``rows`` rows, its parts that have one value for each row: tensors of which
    the first dimension is that of the rows, and lists with an entry for each row. Parts that are made of the rows in
    another way, such as the nodes of all graphs in one tensor, are left out."""
    return dict(_columns(tree, rows, ""))


def same_values(one: Any, other: Any) -> bool:
    """Whether two values of a column are the same. Where one is longer, which padding to the longest row of a batch
    does, the shorter one has to be its beginning or its end."""
    if isinstance(one, list) or isinstance(other, list):
        if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
            return False
        return all(map(same_values, one, other))
    a, b = np.asarray(one), np.asarray(other)
    if a.ndim != b.ndim:
        return False
    return any(
        np.array_equal(_cut(a, b, at_end), _cut(b, a, at_end), equal_nan=a.dtype.kind == "f")
        for at_end in (False, True)
    )


def _cut(array: Array, other: Array, at_end: bool) -> Array:
    """The beginning, or the end, of an array, no longer in any dimension than the other one."""
    sizes = [(size, min(size, limit)) for size, limit in zip(array.shape, other.shape, strict=True)]
    return array[tuple(slice(size - most, size) if at_end else slice(most) for size, most in sizes)]


def _columns(tree: Any, rows: int, place: str) -> Iterator[tuple[str, Column]]:
    if isinstance(tree, Rows):
        if tree.values.ndim and len(tree.values) == rows:
            yield place, tree.values
    elif isinstance(tree, Structure):
        yield from _columns(tree.parts, rows, place)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _columns(value, rows, f"{place}.{key}")
    elif isinstance(tree, list | tuple):
        if len(tree) != rows or all(isinstance(each, Rows) and each.values.shape[:1] == (rows,) for each in tree):
            for number, value in enumerate(tree):
                yield from _columns(value, rows, f"{place}.{number}")
        else:
            entries = [list(arrays_of(each)) for each in tree]
            if not all(array.shape[:1] == (rows,) for entry in entries for array in entry):  # else it can be either
                yield place, entries
