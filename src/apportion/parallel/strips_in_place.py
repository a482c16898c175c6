"""What a model writes in place on a strip, and what else of the graph sees the same memory.

::

    a = y[:, :, 1:]      in the plain model a is a part of y; on strips a may be a copy, with rows of other ranks
    a.mul_(2)            then y is not changed

Where that can be told apart, it is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from apportion.parallel.strips_arguments import in_place

_SAME = {
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "view", "permute", "transpose", "chunk", "split",
    "detach", torch.permute, torch.transpose, torch.chunk, torch.split, functional.dropout, functional.dropout1d,
    functional.dropout2d, functional.dropout3d,
}  # fmt: skip
"""What may give the memory that it got, on strips where it does so in the plain model."""
_OTHER = {"contiguous", "flatten", "reshape", torch.flatten, torch.reshape, operator.getitem}
"""What may give the memory that it got, and a copy on strips; or the other way round."""


def refuse_shared_writes(node: Node, layers: Mapping[str, nn.Module]) -> None:
    """``layers``: those of the model, by name."""
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
    """All that has this memory, as far as it is known, or as far as it may."""
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
    """Does it give the memory of its first argument?"""
    if node.op == "call_module":
        layer = layers[str(node.target)]
        if isinstance(layer, nn.Flatten):
            return across
        return isinstance(layer, nn.Identity | nn.modules.dropout._DropoutNd) or _writes(node, layers)
    if node.op not in ("call_function", "call_method"):
        return False
    return node.target in _SAME or _writes(node, layers) or (across and node.target in _OTHER)
