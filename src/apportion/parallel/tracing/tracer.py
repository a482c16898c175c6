"""The graph of a network: the layers and functions that its forward calls, in order, and what they are called on.

One tracer serves all that plans, cuts or exports a network. These uses differ in what stays one node (``whole``), and
in how they treat a forward that does more than its graph shows: that changes itself, draws numbers once, turns
gradients off. Code that runs the graph (stages, strips, wavefronts) takes the module whole in which that happens; code
that runs the network's own forward, and looks at the graph alone (slices), ``goes_on`` and reads it.

Besides ``follow`` and its ``Tracer``, this module has the reasons why a forward cannot be followed, as sentences that
name the user's line (``reason``, ``unregistered``); the tensors that a forward makes in a size of its arguments, as
nodes (``factories_traced``); the writes in place of a graph (``written``, ``in_place``); and the arguments with which a
graph is called, by the names of the network's own forward (``not_given``, ``names``, ``arguments``).
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from apportion.core import tree
from apportion.core.rng import fork_rng, gpus_in_use
from apportion.core.torch_private import hooked, pytree
from apportion.parallel.tracing.forward_signature import Given, opened, with_names
from apportion.parallel.tracing.side_effects import HOLDERS, Before, draws
from apportion.parallel.tracing.uncompiled import uncompiled
from apportion.process import PACKAGE

# The reason why a forward cannot be followed, in a sentence that names the line: what torch.fx says is about
# torch.fx.

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(PACKAGE)


def reason(error: BaseException) -> str:
    """The reason for an error that a forward raised as it was called with stand-ins for tensors."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error).splitlines()[0] if str(error) else ""
    if said_here(error):
        return text
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN, "<"))]
    where = f"at {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line}) " if own else ""
    if "control flow" in text:
        return f"{where}what is in a tensor, or its shape, decides about control flow"
    if "iterat" in text or "__len__" in text or "'len'" in text or "len(" in text:
        return f"{where}it loops over a tensor or asks for a length, which is known only as it runs"
    return f"{where}it does what is known only as it runs"


def said_here(error: BaseException) -> bool:
    """Return whether an error's message is one of this package, and not what torch or the network says of the stand-ins
    that it is given."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OWN)


def unregistered(root: nn.Module, module: nn.Module) -> str:
    """The message for a module that torch does not find: it says which attribute has the module."""
    for path, owner in root.named_modules():
        for name, value in vars(owner).items():
            holds = isinstance(value, list | tuple | dict) and name not in HOLDERS
            if holds and any(leaf is module for leaf in pytree.tree_leaves(value)):
                return (
                    f"{f'{path}.{name}'.lstrip('.')} is a {type(value).__name__} with a {type(module).__name__} in it, "
                    "which torch does not find there, nor trains or saves: make it an nn.ModuleList or nn.ModuleDict"
                )
    return f"it calls a {type(module).__name__} that is not an attribute of a module, and that torch does not find"


# Tensors that a forward makes in a size of those it is given, as nodes of its graph.

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


@contextmanager
def factories_traced() -> Iterator[None]:
    """Make tensors that are built in a size of the traced ones become nodes of the graph, too."""

    def traced(function: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            proxies = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Proxy)]
            if not proxies:
                return function(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

        return make

    originals = {name: getattr(torch, name) for name in _FACTORIES}
    for name, original in originals.items():
        setattr(torch, name, traced(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


Whole = Callable[[str, nn.Module], bool]
"""A function of a module's path and the module, which says whether the module is one node."""


class Unfollowed(ValueError):
    """A forward that cannot be followed."""

    def __init__(self, message: str, path: str = "", why: str = "", does: str | None = None) -> None:
        super().__init__(message)
        self.path, self.why = path, why
        self.does = does
        """The effect of the forward that no graph shows, as ``changes its own steps``; None: something else is
        wrong."""


def of_torch(path: str, module: nn.Module) -> bool:
    """Return whether a module is one of torch's own layers."""
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)


def follow(
    model: nn.Module,
    inputs: Any = None,
    *,
    known: dict[str, Any] | None = None,
    whole: Whole = of_torch,
    opaque: Callable[[nn.Module], bool] = lambda module: True,
    writes: bool = True,
) -> fx.Graph:
    """The graph of a model that is called with these inputs: layers of torch, modules that cannot be followed, and the
    functions between them. Unfollowed where the model itself cannot be, or a module that may not be ``opaque``.

    ``known``: the arguments that are traced as values (None: those that get nothing). ``writes``: whether the graph may
    write into buffers; else a module that does so cannot be followed.
    """
    closed: set[str] = set()
    given = opened(model, inputs) if known is None else None
    known = not_given(model, inputs) if known is None else known

    def is_whole(path: str, module: nn.Module) -> bool:
        return path in closed or (whole(path, module) and not _is_plain_encoder(module))

    while True:
        try:
            tracer = Tracer(is_whole)
            tracer.given = given
            graph = tracer.trace(model, known)
            if not writes:
                _refuse_writes(graph, model)
            if inputs is not None:
                _keep_what_is_none(graph, inputs, known or ())
            return graph
        except Unfollowed as error:
            if not error.path or not opaque(model.get_submodule(error.path)):
                raise
            closed.add(error.path)


def _is_plain_encoder(module: nn.Module) -> bool:
    return type(module) is nn.TransformerEncoder and not hooked(module, forward_only=True)


class Tracer(fx.Tracer):
    """The tracer of torch.fx, which in addition tells what a forward does beside its graph."""

    proxy_buffer_attributes = True  # who decides by a buffer's numbers is not followed; they may be others next time
    trace_asserts = True

    def __init__(self, whole: Whole = of_torch, *, goes_on: bool = False) -> None:
        super().__init__()
        self._whole, self._goes_on = whole, goes_on
        self.beside: list[str] = []
        """The effects of the forward that the graph does not show, where the tracer goes on after one."""
        self._modes: tuple[Any, ...] = ()
        self.given: Given | None = None
        """The way in which an open forward is called."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._modes = _modes()
        with uncompiled(), factories_traced(), fork_rng(gpus_in_use()), self._followed("", root):
            graph = super().trace(root, concrete_args)
        self.beside += [f"changes its own {name}" for name, _ in written(graph)] if self._goes_on else []
        return graph

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The function that is traced, and its arguments. An open forward is called as it will be, whatever it is
        decorated with: an argument that it is not given has its default."""
        if self.given is None:
            run, given = super().create_args_for_root(root_fn, is_module, concrete_args)
        else:
            run = functools.partial(with_names, root_fn, self.given)
            given = [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.given.names)]

        @functools.wraps(root_fn)
        def forward(*values: Any) -> Any:
            return _shown(run(*values))

        return forward, given

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._whole(module_qualified_name, m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        if type(m) is nn.TransformerEncoder:
            encoder: Any = m
            forward = lambda *a, **k: _encode(encoder, *a, **k)  # noqa: E731
        if self._goes_on:
            return super().call_module(m, forward, args, kwargs)
        with self._followed(path, m):
            return super().call_module(m, forward, args, kwargs)

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError:
            raise NameError(unregistered(self.root, mod)) from None

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            does = "turns gradients or autocast on or off for a part of it"
            if not self._goes_on:
                raise _Beside(does)
            self.beside.append(does)
        return super().create_node(*args, **kwargs)

    @contextmanager
    def _followed(self, path: str, module: nn.Module) -> Iterator[None]:
        """Find what a forward does that a graph does not show: it makes the module opaque, or is noted."""
        before, drawn = Before(module, whole=not path), draws()
        where = path or type(module).__name__
        try:
            yield
        except Unfollowed:
            before.put_back()
            raise
        except Exception as error:  # whatever the network's own code raises at a stand-in for a tensor
            before.put_back()
            does = str(error) if isinstance(error, _Beside) else None
            why = reason(error) if does is None else f"it {does}"
            raise Unfollowed(f"the forward of {where} cannot be followed: {why}", path, why, does) from error
        changed, stays = before.put_back()
        found = [f"changes its own {', '.join(changed)}"] if changed else []
        if draws() != drawn:
            found.append("draws random numbers whose shape is not a tensor's")
        if found and (stays or not self._goes_on):  # what else uses a tensor that stays with a module is unknown
            why = f"it {found[0]}"
            raise Unfollowed(f"the forward of {where} cannot be followed: {why}", path, why, found[0])
        self.beside += found


def _shown(outputs: Any) -> Any:
    """The outputs, if a graph can give them: dicts that are more than dicts are built within a forward."""
    if isinstance(outputs, dict) and type(outputs) not in (dict, OrderedDict):
        raise _Beside(f"gives a {type(outputs).__name__}, which it builds as it computes")
    return outputs


class _Beside(Exception):
    """An effect that no graph shows."""


def _modes() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return torch.is_grad_enabled(), *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def _encode(encoder: nn.TransformerEncoder, src: Any, mask: Any = None, **options: Any) -> Any:
    """The result of torch's encoder when it is trained, without its look at the shape of ``src``."""
    if any(value is not None for value in options.values()):
        raise TypeError("the encoder has a padding mask, or a hint that it is causal")
    for layer in encoder.layers:
        src = layer(src, src_mask=mask)
    return src if encoder.norm is None else encoder.norm(src)


def written(graph: fx.Graph) -> list[tuple[str, fx.Node]]:
    """The buffers that a graph writes into, with the calls that do."""
    found = []
    for node in graph.nodes:
        into = node.kwargs.get("out")
        if in_place(node) and node.args:
            into = node.args[0]
        while isinstance(into, fx.Node) and _function(into) in _VIEWS:
            into = into.args[0]
        if isinstance(into, fx.Node) and into.op == "get_attr":
            found.append((str(into.target), node))
    return found


def in_place(node: fx.Node) -> bool:
    """Return whether a call changes the first of the values that it is given."""
    name = _function(node)
    ends = name.endswith("_") and not name.endswith("__")
    return ends or bool(node.kwargs.get("inplace")) or name in ("setitem", "iadd", "imul", "isub", "itruediv")


_VIEWS = frozenset((
    "view", "reshape", "getitem", "getattr", "transpose", "permute", "t", "narrow", "select", "unsqueeze", "squeeze",
    "expand", "flatten", "unflatten", "detach", "chunk", "split", "unbind", "diagonal", "movedim", "swapaxes",
))  # fmt: skip
"""The functions that may give the memory of the first value that they are given."""


def _function(node: fx.Node) -> str:
    """The name of a function or a method; empty for other nodes."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else ""


def _refuse_writes(graph: fx.Graph, model: nn.Module) -> None:
    for name, node in written(graph):
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, does = (str(stack[-1][0]) if stack else ""), f"changes its own {name}"
        where = path or type(model).__name__
        raise Unfollowed(f"the forward of {where} cannot be followed: it {does}", path, f"it {does}", does)


# Calling


def not_given(model: nn.Module, inputs: Any, *state: Any) -> dict[str, Any] | None:
    """The arguments of a forward that get nothing, or None, with their defaults: they are traced as values, since the
    forward may ask whether an argument is None. None where nothing is known of the inputs."""
    if inputs is None:
        return None
    given, named = tree.arguments(inputs, *state)
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind_partial(*given, **named).arguments
    except TypeError:  # the call itself will say so
        return None
    rest = {name: p.default for name, p in signature.parameters.items() if name not in bound}
    nothing = {name: None for name, value in bound.items() if value is None}
    return nothing | {name: value for name, value in rest.items() if value is not inspect.Parameter.empty}


def names(graph: fx.Graph) -> dict[fx.Node, str]:
    """The names of the nodes that compute or are arguments, as a ``Layer`` has them."""
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
    """The inputs that a model is called with, one for each argument of the graph, in order. ValueError, which names the
    argument, where the graph was followed without one that is given now, or with one that is not."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    given, named = tree.arguments(inputs)
    taken, places = len(given), {node.target: node for node in holders}
    for name, value in named.items():
        if name not in places:  # it got nothing, or None, and is a constant of the graph
            constant = places.get(f"{name}_1")
            if constant is None or value is not (constant.args[0] if constant.args else None):
                raise ValueError(_otherwise_called(name))
    if taken > len(holders):
        raise ValueError(_otherwise_called(f"argument {len(holders)}"))
    found = list(given)
    for node in holders[taken:]:
        if node.target not in named and not node.args and not node.meta.get(_WAS_NONE):
            raise ValueError(_otherwise_called(str(node.target)))
        found.append(named.get(str(node.target), node.args[0] if node.args else None))
    for node, value in zip(holders, found, strict=True):
        if node.meta.get(_WAS_NONE, value is None) != (value is None):
            raise ValueError(_otherwise_called(node.meta[_NAME]))
    return found


_WAS_NONE, _NAME = "was None", "name"
"""The names of what is kept with an argument of a graph: whether it was None where the graph was followed, and its
name in the forward."""


def _keep_what_is_none(graph: fx.Graph, inputs: Any, known: Collection[str]) -> None:
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    given, named = tree.arguments(inputs)
    for place, node in enumerate(holders):
        name = str(node.target)
        constant = name.removesuffix("_1")
        node.meta[_NAME] = constant if constant in known else name
        if place < len(given) or name in named:
            node.meta[_WAS_NONE] = (given[place] if place < len(given) else named[name]) is None
        else:
            node.meta[_WAS_NONE] = not node.args or node.args[0] is None


def _otherwise_called(name: str) -> str:
    return (
        f"collate gives {name} for some batches, and for others none, or None: a network that is followed, to be "
        f"divided, is called with the same arguments for every batch; give {name} always or never, or use data_parallel"
    )
