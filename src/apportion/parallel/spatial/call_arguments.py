"""A call as it stands in the model: its arguments by name, and which of them lie in strips.

A model may write in place on a strip that another part of the graph sees::

    a = y[:, :, 1:]      in the full model a is a part of y; on strips a may be a copy, with rows of other ranks
    a.mul_(2)            then y is not changed

Where the two can be distinguished, the call is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from apportion.parallel.spatial.placements import SpatialPlan
from apportion.parallel.spatial.strip import SpatialShard

Call = Callable[[SpatialPlan, Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""A function that computes a call on strips, called with (plan, the function as it stands in the model, its
arguments), strips among the arguments; it gives what comes out."""

_NUMPYS = {"axis": "dim", "keepdims": "keepdim", "x": "input"}
"""The names of arguments that torch takes, too, with its own names for them."""


def arguments(names: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by name. An argument that is not among ``names`` may change what comes out, and is
    refused."""
    known = names.split()
    given = {_NUMPYS.get(name, name): value for name, value in kwargs.items()}
    strange = [*map(str, args[len(known) :]), *(f"{name}=" for name in given if name not in known)]
    if strange:
        raise ValueError(f"its argument {strange[0]} is not known on a strip")
    return defaults | dict(zip(known, args, strict=False)) | given


def image_of(given: Mapping[str, Any]) -> SpatialShard:
    """The input of a call, which has to be a strip. Raises ValueError where it is not."""
    x = given.get("input")
    if not isinstance(x, SpatialShard):
        raise ValueError("one of its arguments is a part of an image, and its input is not")
    return x


def name_of(call: Any) -> str:
    """The name of a function, or of a method."""
    return str(call if isinstance(call, str) else call.__name__)


def function_of(call: Any) -> Callable[..., Any]:
    """A function to call: the given one, or for a method's name the method of the first argument."""
    if not isinstance(call, str):
        function: Callable[..., Any] = call
        return function
    return lambda x, *args, **kwargs: getattr(x, call)(*args, **kwargs)


def in_place(call: Any) -> bool:
    """Return whether a call writes into its first argument."""
    if getattr(call, "__module__", "") == "_operator":
        return name_of(call) in ("iadd", "isub", "imul", "itruediv", "ipow")
    return name_of(call).endswith("_")


def unflat(x: SpatialShard) -> SpatialShard:
    """The image itself; ValueError where it was flattened."""
    if x.flat:
        raise ValueError(f"{x.describe()} was flattened, and is used as an image")
    return x


# Calls in place


_SAME = {
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "view", "permute", "transpose", "chunk", "split",
    "detach", torch.permute, torch.transpose, torch.chunk, torch.split, functional.dropout, functional.dropout1d,
    functional.dropout2d, functional.dropout3d,
}  # fmt: skip
"""Calls that may give the memory that they got, on strips where they do so in the plain model."""
_OTHER = {"contiguous", "flatten", "reshape", torch.flatten, torch.reshape, operator.getitem}
"""Calls that may give the memory that they got, and a copy on strips; or the other way round."""


def refuse_shared_writes(node: Node, layers: Mapping[str, nn.Module]) -> None:
    """Refuse a node that writes in place what another tensor that is used shares. ``layers``: those of the model, by
    name."""
    if not (_writes(node, layers) and node.all_input_nodes):
        return
    written = node.all_input_nodes[0]
    sure, perhaps = (_family(written, layers, across) for across in (False, True))
    later = set()  # a part that is taken later sees what was written
    at: Any = node.next
    while at.op != "root":
        later.add(at)
        at = at.next
    if any(user in later and user not in sure for member in perhaps - sure - later for user in member.users):
        raise ValueError(
            "it writes in place what is a part of another tensor, or of which another is a part, and both are used: "
            "write it as a new tensor"
        )


def _writes(node: Node, layers: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(layers[str(node.target)], "inplace", False))
    return node.op != "placeholder" and (bool(node.kwargs.get("inplace", False)) or in_place(node.target))


def _family(of: Node, layers: Mapping[str, nn.Module], across: bool) -> set[Node]:
    """All nodes that have the memory of this one, as far as it is known, or with ``across`` as far as they may."""
    found, left = {of}, [of]
    while left:
        at = left.pop()
        near = [*(at.all_input_nodes[:1] if _shares(at, layers, across) else [])]
        near += [user for user in at.users if user.all_input_nodes[0] is at and _shares(user, layers, across)]
        for other in near:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def _shares(node: Node, layers: Mapping[str, nn.Module], across: bool) -> bool:
    """Return whether a node gives the memory of its first argument."""
    if node.op == "call_module":
        layer = layers[str(node.target)]
        if isinstance(layer, nn.Flatten):
            return across
        return isinstance(layer, nn.Identity | nn.modules.dropout._DropoutNd) or _writes(node, layers)
    if node.op not in ("call_function", "call_method"):
        return False
    return node.target in _SAME or _writes(node, layers) or (across and node.target in _OTHER)
