"""Functions on all leaves of trees of tensors, as inputs, targets, outputs and recurrent states are.

A tree is anything that nests tensors: tuples, lists, dicts, every other ``Mapping`` (transformers' ``BatchEncoding`` is
one), a ``PackedSequence``, a dataclass, and any other object whose attributes are tensors, as a graph is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from apportion.core.torch_private import pytree

_WITHOUT_TENSORS = (str, bytes, int, float, complex, type, FunctionType, ModuleType, nn.Module, torch.Generator)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply the function to each tensor of a tree, and return the tree of the results; other leaves stay. Of a
    ``PackedSequence`` these are its data and its orders, and not the sizes, which stay on the CPU."""
    if isinstance(tree, Tensor):  # nearly every input is one tensor: skip the general walk
        return function(tree)
    return pytree.tree_map(lambda leaf: _mapped(function, leaf), tree, is_leaf=_is_not_pytree)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    if isinstance(tree, Tensor):
        return [tree]
    return list(_tensors(tree))


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(tree, is_leaf=_is_not_pytree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, PackedSequence):
            yield from (t for t in (leaf.data, leaf.sorted_indices, leaf.unsorted_indices) if t is not None)
        elif isinstance(leaf, Mapping):
            yield from (t for value in leaf.values() for t in _tensors(value))
        elif (attributes := _attributes(leaf)) is not None:
            yield from (t for value in attributes.values() for t in _tensors(value))


def _is_not_pytree(value: Any) -> bool:
    """Tells whether torch's trees have another idea of a value than this module: they know of mappings by their exact
    class, and take a packed sequence for a tuple."""
    kind = type(value)
    if kind is PackedSequence:
        return True
    return kind not in pytree.SUPPORTED_NODES and isinstance(value, Mapping)


def _mapped(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    """What ``map_tensors`` makes of a value that torch's trees do not enter."""
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, PackedSequence):
        orders = [None if t is None else function(t) for t in (leaf.sorted_indices, leaf.unsorted_indices)]
        return PackedSequence(function(leaf.data), leaf.batch_sizes, *orders)
    if isinstance(leaf, Mapping):
        return mapping_like(leaf, {key: map_tensors(function, value) for key, value in leaf.items()})
    if (attributes := _attributes(leaf)) is None:
        return leaf
    changed = {name: map_tensors(function, value) for name, value in attributes.items()}
    if all(changed[name] is value for name, value in attributes.items()):
        return leaf
    copied = copy.copy(leaf)
    for name, value in changed.items():
        own = vars(copied).get(name)
        if isinstance(own, MutableMapping) and own is not attributes[name]:  # a copy of its own, that knows its object
            own.update(value)
        else:
            object.__setattr__(copied, name, value)  # a frozen dataclass has a __setattr__ that refuses
    return copied


def mapping_like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the class of another one, with these values."""
    if isinstance(mapping, MutableMapping):
        copied = copy.copy(mapping)
        copied.update(values)
        return copied
    try:
        made: Any = type(mapping)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
    return made if isinstance(made, Mapping) and made.keys() == values.keys() else values


def _attributes(leaf: Any) -> dict[str, Any] | None:
    """The attributes of an object that hold tensors; None where none do. Objects among them are entered where they are
    dataclasses: others may refer to anything, and back."""
    if leaf is None or isinstance(leaf, _WITHOUT_TENSORS):
        return None
    own = getattr(leaf, "__dict__", None)
    if type(own) is not dict:
        return None
    return {name: value for name, value in own.items() if _holds_tensors(value)} or None


def _holds_tensors(value: Any) -> bool:
    if value is None or isinstance(value, _WITHOUT_TENSORS):
        return False
    for leaf in pytree.tree_leaves(value, is_leaf=_is_not_pytree):
        if isinstance(leaf, Tensor | PackedSequence):
            return True
        if isinstance(leaf, Mapping) and any(map(_holds_tensors, leaf.values())):
            return True
        if is_dataclass(leaf) and _attributes(leaf) is not None:
            return True
    return False


def cast(tree: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Every tensor on the device; floating ones in the dtype (None: as they are), complex ones in its complex type."""

    def move(t: Tensor) -> Tensor:
        if dtype is not None and t.is_complex():
            return t.to(device=device, dtype=dtype.to_complex())
        return t.to(device=device, dtype=dtype if dtype is not None and t.is_floating_point() else None)

    return map_tensors(move, tree)


def length(tree: Any) -> int:
    """The size of dimension 0, which is the example."""
    leaves = tensors(tree)
    if not leaves or leaves[0].ndim == 0:
        raise ValueError("a batch needs at least one tensor with dimension 0 as the example; check `collate`")
    return leaves[0].shape[0]


def call(model: Callable[..., Any], inputs: Any, *state: Any) -> Any:
    """Call model(x) for a tensor, model(*x) for a tuple or list, model(**x) for a dict or another mapping; a recurrent
    state comes last (``state=`` with a mapping). Any other object, a PackedSequence among them, is passed as it is."""
    given, named = arguments(inputs, *state)
    return model(*given, **named)


def arguments(inputs: Any, *state: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments with which ``call`` calls a model."""
    if isinstance(inputs, Tensor | PackedSequence):
        return (inputs, *state), {}
    if isinstance(inputs, tuple | list):
        return (*inputs, *state), {}
    if isinstance(inputs, Mapping):
        return (), {**inputs, **({"state": state[0]} if state else {})}
    return (inputs, *state), {}
