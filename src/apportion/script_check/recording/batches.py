"""Between a script's batches and what is recorded of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.script_check.rows import Rows

_NUMPY_HAS_NONE = (torch.bfloat16, torch.float16)


def recorded(tree: Any) -> Any:
    """Returns a batch as a tree of arrays; what is neither a tensor nor a container stays as it is."""
    if isinstance(tree, Tensor):
        tensor = tree.detach().cpu()
        name = str(tensor.dtype).removeprefix("torch.")
        return Rows((tensor.float() if tensor.dtype in _NUMPY_HAS_NONE else tensor).numpy().copy(), name)
    if isinstance(tree, Mapping):
        return {key: recorded(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tuple(map(recorded, tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map(recorded, tree)) if type(tree) in (tuple, list) else list(map(recorded, tree))
    if isinstance(tree, np.ndarray):
        return Rows(tree.copy(), "numpy")
    return tree if isinstance(tree, int | float | str | bytes | bool | type(None)) else repr(tree)


def restored(tree: Any) -> Any:
    """Returns the batch that a tree of arrays was recorded from."""
    if isinstance(tree, Rows):
        return tree.values if tree.dtype == "numpy" else torch.from_numpy(tree.values).to(getattr(torch, tree.dtype))
    if isinstance(tree, dict):
        return {key: restored(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(restored, tree))
    return tree
