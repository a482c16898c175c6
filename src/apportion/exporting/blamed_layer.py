"""The layer to blame where torch.export, or a compiler after it, gives a network up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

ONE_WAY = "it decides by the numbers in a tensor"
"""What is said of a layer that torch.export cannot follow, because its way or its shapes depend on numbers."""
CHOOSE = "compute both ways and choose with torch.where, or multiply by a mask"
"""What to do about it."""


def blamed_layer(network: nn.Module, error: BaseException) -> str | None:
    """Return the name of the innermost layer in which an error, or one that caused it, was raised: by the frames of its
    forward pass, or by the operation of a graph that was being compiled. Empty is the network itself; None: neither is
    known."""
    names = {id(module): name for name, module in network.named_modules()}
    found = None
    for frame in frames(error):
        found = names.get(id(frame.get("self")), found)
        node = frame.get("node")
        if isinstance(node, fx.Node):
            inner = layer_of(node, set(names.values()))
            found = found if inner is None else inner
    return found


def layer_of(node: fx.Node, names: set[str], prefix: str = "") -> str | None:
    """Return the innermost of these layers that an operation was written in; None: it is in none of them. ``prefix``:
    what stands before the names in the graph."""
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        whole = f"{path}." if path else ""  # that of the network is the prefix itself
        if whole.startswith(prefix):
            name = whole.removeprefix(prefix).removesuffix(".")
            if name in names:
                return name
    return None


def named(network: nn.Module, name: str | None) -> str:
    """Name a layer and its type; the network itself by its type alone."""
    kind = type(network.get_submodule(name or "")).__name__
    return f"layer {name} ({kind})" if name else kind


def decides(error: BaseException | None) -> bool:
    """Is an error that the way or the shapes depend on the numbers in a tensor?"""
    while error is not None:
        if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def first_cause(error: BaseException) -> BaseException:
    """Return the error that all began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def frames(error: BaseException | None) -> Iterator[Mapping[str, Any]]:
    """Return the local variables of the frames that an error and its causes came through, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        at: TracebackType | None = error.__traceback__
        while at is not None:
            yield at.tb_frame.f_locals
            at = at.tb_next
        error = error.__cause__ or error.__context__
