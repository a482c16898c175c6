"""Functions on all leaves of pytrees of tensors, as inputs, targets, outputs and recurrent states are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apportion.core.torch_private import pytree


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply the function to each tensor of a tree, and return the tree of the results; other leaves stay."""
    if isinstance(tree, Tensor):  # nearly every input is one tensor: skip the general walk
        return function(tree)
    return pytree.tree_map_only(Tensor, function, tree)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def cast(tree: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Every tensor on the device; floating ones in the dtype (None: as they are), complex ones in its complex type."""

    def move(t: Tensor) -> Tensor:
        if dtype is not None and t.is_complex():
            return t.to(device=device, dtype=dtype.to_complex())
        return t.to(device=device, dtype=dtype if dtype is not None and t.is_floating_point() else None)

    return map_tensors(move, tree)


def rows(tree: Any, part: slice) -> Any:
    """A slice of dimension 0 of every tensor."""
    return map_tensors(lambda t: t[part], tree)


def length(tree: Any) -> int:
    """The size of dimension 0, which is the example."""
    leaves = tensors(tree)
    if not leaves or leaves[0].ndim == 0:
        raise ValueError("a batch needs at least one tensor with dimension 0 as the example; check `collate`")
    return leaves[0].shape[0]


def call(model: Callable[..., Any], inputs: Any, *state: Any) -> Any:
    """Call model(x) for a tensor, model(*x) for a tuple or list, model(**x) for a dict; a recurrent state comes last
    (``state=`` with a dict)."""
    if isinstance(inputs, Tensor):
        return model(inputs, *state)
    if isinstance(inputs, tuple | list):
        return model(*inputs, *state)
    if isinstance(inputs, dict):
        return model(**inputs, **({"state": state[0]} if state else {}))
    return model(inputs, *state)
