"""The rows of what collate returned: how many they are, and parts of them.

Collate is given examples, and may return another number of rows: it may leave broken examples out, pack sequences into
one row, or give what has no rows at all, as a graph. A value has ``n`` rows where each of its leaves has:

- a dense tensor (or numpy array) with size ``n`` in dimension 0;
- a list or tuple with an entry a row: ``n`` entries, which are not all tensors of ``n`` rows themselves;
- a number, a text, None, or a list of another length without tensors: these belong to the batch, and every part of it
  has them.

A tensor without dimensions, a ``PackedSequence``, a nested or a sparse tensor, and an object of a class of the user's
that is not a dataclass have no rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from apportion.core import tree


def row_count(inputs: Any, targets: Any, examples: int) -> int:
    """The number of rows of a batch that collate made of this many examples: what its targets show, or its inputs where
    the targets show nothing. ValueError, which names the leaf, where leaves disagree and none has a row for each
    example."""
    if isinstance(targets, Tensor) and targets.shape[:1] == (examples,):  # nearly every batch
        return examples
    shown, name, sizes = targets, "targets", list(_sizes(targets))
    if not sizes:
        shown, name, sizes = inputs, "inputs", list(_sizes(inputs))
    if not sizes:
        return examples
    misfit = misfit_of(shown, sizes[0], name)
    if examples in sizes:  # of a list of as many tensors the inputs tell whether these are entries or columns
        columns = misfit is None and sizes[0] != examples and misfit_of(inputs, sizes[0], "inputs") is None
        return sizes[0] if columns else examples
    if misfit is None:
        return examples if _lies_elsewhere((inputs, targets), examples) else sizes[0]
    raise ValueError(
        f"collate made {misfit} of {examples} examples, and {sizes[0]} rows elsewhere in {name}: the number of loss "
        "terms cannot be derived from it; state it with count=lambda targets: ..., or return a row for each example"
    )


def rows_of(value: Any, part: slice, rows: int | None = None, name: str = "inputs") -> Any:
    """A slice of the rows of a value that has ``rows`` of them (None: as many as its tensors agree on). ValueError,
    which names the leaf, where a leaf has another number of rows, or none."""
    if isinstance(value, Tensor) and rows is None and _is_dense(value):
        return value[part]
    many = next((n for n in _sizes(value) if misfit_of(value, n, name) is None), None) if rows is None else rows
    if many is None:
        many = next(_sizes(value), 0)
    if misfit := misfit_of(value, many, name):
        parts = f"parts of {many} rows" if many else "parts"
        raise ValueError(
            f"{misfit}, which cannot be cut into {parts}: where a batch is divided, dimension 0 of every tensor that "
            "collate returns must be the example"
        )
    return _cut(value, part, many)


def misfit_of(value: Any, rows: int, name: str) -> str | None:
    """The first leaf of a value that does not have this many rows, as the beginning of a sentence; None: all have."""
    for path, leaf in _leaves(value, rows, name):
        if isinstance(leaf, Tensor | np.ndarray):
            if not _is_dense(leaf):
                return f"{path} is {_kind(leaf)}"
            if leaf.shape[0] != rows:
                return f"{path} has {leaf.shape[0]} rows in place of {rows}"
        elif isinstance(leaf, PackedSequence) or any(True for _ in tree.tensors(leaf)):
            return f"{path} is a {type(leaf).__name__}"
    return None


def unjoined_leaf(value: Any, name: str) -> str | None:
    """The first leaf of a value whose rows cannot be put behind those of another rank, as the beginning of a sentence;
    None: all can."""
    if isinstance(value, Tensor):
        return None if _is_dense(value) else f"{name} is {_kind(value)}"
    if isinstance(value, list | tuple) and not _is_named(value):
        unlike = len({t.shape[:1] for t in tree.tensors(value)}) > 1
        if unlike or any(isinstance(each, str) for each in value):
            return f"{name} is a {type(value).__name__} of {len(value)} entries"
    children = _children(value)
    if children is None:
        held = isinstance(value, np.ndarray) or bool(tree.tensors(value))
        return f"{name} is a {type(value).__name__}" if held else None
    return next((found for path, inner in children if (found := unjoined_leaf(inner, name + path))), None)


def joined_structure(value: Any) -> str | None:
    """What values have in common whose rows can be put one after the other: the names of their leaves, with the types
    and the shapes of a row. None where that cannot be done leaf by leaf, as with lists of entries, and where one cannot
    tell entries from columns."""
    sizes = {int(t.shape[0]) if _is_dense(t) else -1 for t in tree.tensors(value)}
    if len(sizes) != 1 or -1 in sizes:
        return None
    described = _described(value, sizes.pop(), "")
    return None if described is None else "\n".join(described)


def _described(value: Any, rows: int, path: str) -> list[str] | None:
    if isinstance(value, Tensor):
        return [f"{path} {value.dtype} {tuple(value.shape[1:])}"]
    if value is None or type(value) in (bool, int, float, str):
        return [f"{path} {value!r}"]
    children = _children(value)
    if children is None:
        return None
    if isinstance(value, list | tuple) and (len(value) == rows or not all(map(tree.tensors, value))):
        return None
    found: list[str] = []
    for name, inner in children:
        described = _described(inner, rows, path + name)
        if described is None:
            return None
        found += described
    return found


def _leaves(value: Any, rows: int, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a value by their names in the program of the user. Lists with an entry a row are not entered: their
    entries have what shapes they like."""
    if isinstance(value, list | tuple) and not _is_named(value) and _is_entries(value, rows):
        return
    children = _children(value)
    if children is None:
        yield name, value
        return
    for path, inner in children:
        yield from _leaves(inner, rows, name + path)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What a value nests, by how it is written after the value's name; None for a leaf."""
    if isinstance(value, PackedSequence | Tensor):
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if _is_named(value):
        return [(f".{key}", getattr(value, key)) for key in value._fields]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", inner) for i, inner in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    return None


def _cut(value: Any, part: slice, rows: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[part]
    if isinstance(value, Mapping):
        return tree.mapping_like(value, {key: _cut(inner, part, rows) for key, inner in value.items()})
    if _is_named(value):
        return type(value)(*(_cut(inner, part, rows) for inner in value))
    if isinstance(value, list | tuple):
        entries = _is_entries(value, rows) or (len(value) == rows and not any(map(tree.tensors, value)))
        kept = value[part] if entries else [_cut(inner, part, rows) for inner in value]
        return kept if type(kept) is type(value) else type(value)(kept)
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in fields(value):
            object.__setattr__(copied, field.name, _cut(getattr(value, field.name, None), part, rows))
        return copied
    return value


def _sizes(value: Any) -> Iterator[int]:
    """The numbers of rows that the leaves of a value show, in its order."""
    if isinstance(value, Tensor | np.ndarray):
        if _is_dense(value):
            yield int(value.shape[0])
        return
    inner = [size for _, each in _children(value) or () for size in _sizes(each)]
    yield from inner
    if isinstance(value, list | tuple) and not _is_named(value):
        yield len(value)  # where these are entries


def _is_entries(value: list[Any] | tuple[Any, ...], rows: int) -> bool:
    """Tells whether a list that holds tensors has an entry for each row, and is not columns of this many rows each."""
    if len(value) != rows:
        return False
    found = tree.tensors(value)
    return bool(found) and any(not _is_dense(t) or t.shape[0] != rows for t in found)


def _lies_elsewhere(pair: Any, examples: int) -> bool:
    """Tells whether the examples lie in another dimension than the first, as where sequences lie time first."""
    dense = [t for t in tree.tensors(pair) if _is_dense(t)]
    return bool(dense) and all(examples in t.shape[1:] for t in dense)


def _is_dense(value: Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return value.layout is torch.strided and not value.is_nested and value.dim() > 0


def _kind(value: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    return "a tensor without rows"


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
