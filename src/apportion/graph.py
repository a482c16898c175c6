"""The graph of a network: which layers and functions its forward calls, in order, on what."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn


class Unfollowed(ValueError):
    """The network's own forward cannot be followed."""


class _Opaque(Exception):
    """A module's forward cannot be followed."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why


def follow(model: nn.Module, inputs: Any = None) -> fx.Graph:
    """The graph of a model that is called with these inputs: layers of torch, modules that cannot be followed, and the
    functions between them. Unfollowed where the model itself cannot be."""
    opaque: set[str] = set()
    while True:
        try:
            return _Tracer(opaque).trace(model, not_given(model, inputs))
        except _Opaque as error:
            if not error.path:
                raise Unfollowed(f"the forward of {type(model).__name__} cannot be followed: {error.why}") from error
            opaque.add(error.path)


class _Tracer(fx.Tracer):
    def __init__(self, opaque: set[str]) -> None:
        super().__init__()
        self._opaque = opaque
        self.proxy_buffer_attributes = True  # a buffer that a forward puts another in place of is then found

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with _followed("", root):
            return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._opaque:
            return True
        return type(m) is not nn.TransformerEncoder and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        if type(m) is nn.TransformerEncoder:
            encoder: Any = m
            forward = lambda *a, **k: _encode(encoder, *a, **k)  # noqa: E731
        with _followed(path, m):
            return super().call_module(m, forward, args, kwargs)


def _encode(encoder: nn.TransformerEncoder, src: Any, mask: Any = None, **options: Any) -> Any:
    """What torch's encoder computes when it is trained, without its look at the shape of ``src``."""
    if any(value is not None for value in options.values()):
        raise TypeError("the encoder has a padding mask, or a hint that it is causal")
    for layer in encoder.layers:
        src = layer(src, src_mask=mask)
    return src if encoder.norm is None else encoder.norm(src)


@contextmanager
def _followed(path: str, module: nn.Module) -> Iterator[None]:
    """What a forward does that a graph does not show makes the module opaque."""
    before, draws = _own(module), _draws()
    try:
        yield
    except _Opaque:
        _restore(module, before)
        raise
    except Exception as error:
        _restore(module, before)
        told = str(error).splitlines()[0] if str(error) else ""
        raise _Opaque(path, f"{type(error).__name__}: {told}") from error
    changed = sorted(_restore(module, before))
    if changed:
        raise _Opaque(path, f"it changes its own {', '.join(changed)}")
    if _draws() != draws:
        raise _Opaque(path, "it draws random numbers whose shape is not a tensor's")


_HOLDERS = ("_parameters", "_buffers")


def _own(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What a module has beside modules and hooks."""
    values = {k: v for k, v in vars(module).items() if not isinstance(v, dict)}
    return {"": values, **{holder: dict(vars(module)[holder]) for holder in _HOLDERS}}


def _restore(module: nn.Module, before: Mapping[str, dict[str, Any]]) -> set[str]:
    """As it was; the names of what was changed."""
    changed = set()
    for holder, values in _own(module).items():
        into = vars(module)[holder] if holder else vars(module)
        for name in {**values, **before[holder]}:
            if name.startswith("_tensor_constant") or values.get(name) is before[holder].get(name):
                continue
            changed.add(name)
            into.pop(name, None)
            into.update({name: before[holder][name]} if name in before[holder] else {})
    return changed


def _draws() -> tuple[Any, ...]:
    generator = torch.default_generator
    return generator.get_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())


def not_given(model: nn.Module, inputs: Any, *state: Any) -> dict[str, Any] | None:
    """The arguments of a forward that get nothing, with their defaults: traced as values, since it may ask whether an
    argument is None. None where nothing is known of the inputs."""
    if inputs is None:
        return None
    positional = (*inputs, *state) if isinstance(inputs, tuple | list) else (inputs, *state)
    given: tuple[Any, ...] = state if isinstance(inputs, dict) else positional
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind_partial(*given, **(inputs if isinstance(inputs, dict) else {})).arguments
    except TypeError:  # the call itself will say so
        return None
    rest = {name: p.default for name, p in signature.parameters.items() if name not in bound}
    return {name: value for name, value in rest.items() if value is not inspect.Parameter.empty}


def names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Of the nodes that compute or are arguments: what a ``Layer`` is called."""
    found: dict[fx.Node, str] = {}
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            calls[path] = calls.get(path, 0) + 1
            found[node] = path if calls[path] == 1 else f"{path}#{calls[path]}"
        elif node.op == "placeholder":
            found[node] = f"input/{node.target}"
        elif node.op in ("call_function", "call_method"):
            found[node] = node.name
    return found


def arguments(graph: fx.Graph, inputs: Any) -> list[Any]:
    """The inputs that a model is called with, one for each argument of the graph, in order."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    if isinstance(inputs, dict):
        given = [inputs[node.target] if node.target in inputs else node.args[0] for node in holders]
        return given
    positional = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    return positional + [node.args[0] for node in holders[len(positional) :]]
