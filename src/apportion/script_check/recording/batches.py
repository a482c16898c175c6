"""Between a script's batches and what is recorded of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.script_check.rows import Rows, Structure

LARGEST_BATCH = 1 << 24
"""The bytes up to which a batch is recorded by its contents although it could be made again from its indices."""
MOST_ROWS = 1 << 30
"""The bytes of larger batches that one rank records by their contents, at most: made again, their rows are others where
they are augmented at random."""
SHARE = 16
"""The larger batches of all ranks may take a 16th of the available memory, as they are copied a few times."""
_NUMPY_HAS_NONE = (torch.bfloat16, torch.float16)
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def recorded(tree: Any) -> Any:
    """Returns a batch as a tree of arrays; numbers and texts stay as they are."""
    if isinstance(tree, Tensor):
        tensor = (tree.to_dense() if tree.layout != torch.strided else tree).detach().to("cpu", copy=True)
        name = str(tensor.dtype).removeprefix("torch.")
        return Rows((tensor.float() if tensor.dtype in _NUMPY_HAS_NONE else tensor).resolve_conj().numpy(), name)
    if isinstance(tree, np.ndarray):
        return Rows(tree.copy(), "numpy")
    if type(tree) in (list, tuple):
        return type(tree)(map(recorded, tree))
    if type(tree) is dict:
        return {key: recorded(value) for key, value in tree.items()}
    return tree if isinstance(tree, _PLAIN) else _structure(tree)


def _structure(tree: Any) -> Any:
    kind, parts = "attributes", getattr(tree, "__dict__", None)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind, parts = "fields", dict(zip(tree._fields, tree, strict=True))
    elif isinstance(tree, Mapping):
        kind, parts = "mapping", dict(tree)
    elif isinstance(tree, list | tuple):
        return list(map(recorded, tree))
    elif hasattr(type(tree), "__slots__") and hasattr(tree, "__dataclass_fields__"):
        parts = {name: getattr(tree, name) for name in tree.__dataclass_fields__}
    if parts is None:
        return repr(tree)
    return Structure(type(tree).__module__, type(tree).__qualname__, kind, {k: recorded(v) for k, v in parts.items()})


def restored(tree: Any) -> Any:
    """Returns the batch that a tree of arrays was recorded from."""
    if isinstance(tree, Rows):
        return tree.values if tree.dtype == "numpy" else torch.from_numpy(tree.values).to(getattr(torch, tree.dtype))
    if isinstance(tree, Structure):
        return _made(tree)
    if isinstance(tree, dict):
        return {key: restored(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(restored, tree))
    return tree


def _made(tree: Structure) -> Any:
    found: Any = sys.modules.get(tree.module)
    for name in tree.name.split("."):
        found = getattr(found, name, None)
    parts = {key: restored(value) for key, value in tree.parts.items()}
    if found is None:  # a class inside of a function
        return parts
    if tree.kind == "fields":
        return found(**parts)
    if tree.kind == "mapping":
        return found(parts)
    made = found.__new__(found)
    for key, value in parts.items():
        object.__setattr__(made, key, value)
    return made


def size(tree: Any) -> int:
    """Returns the bytes of the tensors of a batch."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return sum(map(size, parts))
