"""The nodes of a traced graph: what each calls, by what name, and the tensors of the model that it uses."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn


def called(model: nn.Module, node: fx.Node) -> Callable[..., Any]:
    """Return what a node calls: a layer of the model, a function, or a method of its first argument."""
    target: Any = node.target
    if node.op == "call_module":
        return model.get_submodule(target)
    if node.op == "call_method":
        return lambda x, *args, **kwargs: getattr(x, target)(*args, **kwargs)
    return target  # type: ignore[no-any-return]


def target_name(node: fx.Node) -> str:
    """Return the name of the function or the method that a node calls; of a layer its path."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def attribute(model: nn.Module, path: Any) -> Any:
    """Return what lies under a dotted path in a model."""
    return attrgetter(str(path))(model)


def used_tensors(model: nn.Module, node: fx.Node) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that a call uses, by name."""
    if node.op == "call_module":
        path = str(node.target)
        module = model.get_submodule(path)
        found: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
        found += module.named_buffers(remove_duplicate=False)
        return [(f"{path}.{name}", t) for name, t in found]
    return [(str(n.target), attribute(model, n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
