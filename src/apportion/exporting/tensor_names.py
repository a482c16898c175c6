"""The names of a network's inputs and outputs in a file or behind a server: those of a dict, and numbers otherwise."""

from __future__ import annotations

from typing import Any

from apportion.core.torch_private import pytree
from apportion.exporting.target import Inputs


def input_names(sample: Inputs) -> list[str]:
    """Return the names of the tensors that a network is called with: a dict's keys, joined by dots within one another;
    ``input``, or ``input_0``, ``input_1``, ..."""
    return _names(sample, "input")


def output_names(outputs: Any) -> list[str]:
    """Return the names of the tensors that a network gives: a dict's keys, joined by dots within one another;
    ``output``, or ``output_0``, ``output_1``, ..."""
    return _names(outputs, "output")


def _names(tree: Any, name: str) -> list[str]:
    if isinstance(tree, dict):
        return [".".join(map(_key, path)) for path, _ in pytree.tree_leaves_with_path(tree)]
    leaves = len(pytree.tree_leaves(tree))
    return [name] if leaves == 1 else [f"{name}_{n}" for n in range(leaves)]


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "idx", entry)))
