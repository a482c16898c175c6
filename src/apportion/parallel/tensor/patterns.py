"""The places where a network may be sliced: found from its traced graph, and from a look at one forward pass.

A pair is a Linear (or several, as in a gate) whose outputs go through nothing but element-wise functions, and from
there into one other Linear and nowhere else. Their weights are used by their own layer alone: what a network does with
a weight outside of its layer (a norm, a product by hand) needs it whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from apportion.core import torch_private, tree
from apportion.core.modes import evaluating
from apportion.core.torch_private import pytree
from apportion.cost_model.elementwise import ACTIVATIONS
from apportion.parallel.tracing.forward_signature import opened
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.tracer import Tracer, Unfollowed, not_given, of_torch

# A look at one forward pass of a network: what its graph does not tell of how its layers and weights are used.


@dataclass
class ForwardRecord:
    """The record of what one forward pass did."""

    outside: set[int] = field(default_factory=set)
    """The parameters (by id) that something else than their own layer used."""
    dims: dict[str, int] = field(default_factory=dict)
    """The number of dimensions of each layer's output."""
    packed: set[str] = field(default_factory=set)
    """The layers that were given packed sequences."""
    within: dict[str, set[str]] = field(default_factory=dict)
    """The layers inside of which a layer was called, each time."""


def record_forward(model: nn.Module, inputs: Any, *state: Any) -> ForwardRecord:
    """Run one forward pass, of which nothing remains, and record how layers and weights are used."""
    found, running = ForwardRecord(), [model]
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, given: tuple[Any, ...]) -> None:
        inside = {names[outer] for outer in running}
        found.within[names[module]] = found.within.get(names[module], inside) & inside
        running.append(module)
        if any(isinstance(x, PackedSequence) for x in given):
            found.packed.add(names[module])

    def leave(module: nn.Module, given: Any, output: Any) -> None:
        running.pop()
        if isinstance(output, Tensor):
            found.dims[names[module]] = output.dim()

    hooks = [h for m in model.modules() for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    try:
        with undisturbed(model), _Uses(running, found.outside):
            tree.call(model, inputs, *state)
    finally:
        for hook in hooks:
            hook.remove()
    return found


_ASKS = ("size", "dim", "__set__", "is_floating_point", "numel")
_LOOKS = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "requires_grad", "grad", "layout", "ndim", "is_leaf", "is_cuda", "is_sparse",
        "is_nested", "is_meta", "is_quantized", "grad_fn",
    )
)  # fmt: skip
"""The attributes that tell something of a tensor and give nothing of the numbers in it; ``weight.T`` is a use of it."""


class _Uses(TorchFunctionMode):
    """A mode that notes the parameters that are used outside of their own layer."""

    def __init__(self, running: Sequence[nn.Module], outside: set[int]) -> None:
        super().__init__()
        self._running, self._outside = running, outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOOKS and getattr(func, "__name__", "") not in _ASKS:
            used = {id(p) for p in pytree.tree_leaves((args, kwargs)) if isinstance(p, nn.Parameter)}
            if used:
                self._outside |= used - self._own_parameters()
        return func(*args, **(kwargs or {}))

    def _own_parameters(self) -> set[int]:
        module = self._running[-1]
        # A layer of torch's uses its children's weights as it likes; it is sliced as one, or not at all.
        recurse = type(module).__module__.startswith("torch.nn.")
        return {id(p) for p in module.parameters(recurse=recurse)}


_LAYERS = frozenset((nn.Identity, nn.Dropout, *(getattr(nn, name) for name in ACTIVATIONS.values())))
_NAMES = frozenset((
    *ACTIVATIONS, "relu_", "tanh_", "sigmoid_",
    "mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_", "neg", "square", "abs", "exp", "log", "sqrt", "rsqrt",
    "pow", "clamp", "clamp_min", "clamp_max", "sin", "cos", "erf", "clone", "contiguous",
)) - {"hardshrink", "softshrink"}  # fmt: skip # a plan that was made without these functions stays as it is
_FUNCTIONS = frozenset(
    {getattr(where, name) for name in _NAMES for where in (torch, functional) if hasattr(where, name)}
    | {operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.pow}
    | {operator.imul, operator.iadd, operator.isub, operator.itruediv}
)


@dataclass(frozen=True)
class Pair:
    """A pair of the Linear layers that are cut by columns, and the one that is cut by rows."""

    columns: tuple[str, ...]
    row: str
    dropouts: tuple[str, ...] = ()
    """The dropout layers between the two."""


@dataclass(frozen=True)
class Traced:
    """The graphs of a network, or of one layer of it: as it trains, and as it evaluates."""

    name: str
    model: nn.Module
    graphs: tuple[fx.Graph, ...]
    pure: bool
    """True if running it changes nothing but its outputs. A graph leaves out what else it does (a counter of its
    own)."""

    def plain(self, target: Any) -> str:
        """The name that the network has for a layer."""
        return f"{self.name}.{target}" if self.name else str(target)


def trace(model: nn.Module, inputs: Any = None, name: str = "") -> list[Traced]:
    """The graphs of a network that is called with these inputs; where its flow depends on the data, those of the layers
    that it is made of."""
    try:
        first, second, default = Tracer(goes_on=True), Tracer(goes_on=True), not_given(model, inputs)
        first.given = second.given = opened(model, inputs)
        trains = first.trace(model, default)
        with evaluating(model.modules()):
            evaluates = second.trace(model, default)
        return [Traced(name, model, (trains, evaluates), pure=not first.beside + second.beside)]
    except Unfollowed:
        pass
    inside = ((f"{name}.{child}" if name else child, module) for child, module in model.named_children())
    return [found for child, module in inside if not of_torch(child, module) for found in trace(module, name=child)]


def pairs(traced: Sequence[Traced], candidates: set[str], seen: ForwardRecord) -> list[Pair]:
    """The pairs among these Linear layers, in order of execution; each layer is in one pair at most."""
    found: list[Pair] = []
    taken: set[str] = set()
    for part in traced:
        calls = (n for n in part.graphs[0].nodes if n.op == "call_module")
        for row in dict.fromkeys(part.plain(call.target) for call in calls):
            free = {name for name in candidates - taken if part.name in seen.within.get(name, (part.name,))}
            each = [_pair(part, graph, row, free) for graph in part.graphs if row in free]
            if each and each[0] is not None and all(pair == each[0] for pair in each):
                found.append(each[0])
                taken |= {*each[0].columns, row}
    return found


def _calls(part: Traced, graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module" and part.plain(node.target) == name]


def _pair(part: Traced, graph: fx.Graph, row: str, candidates: set[str]) -> Pair | None:
    region: set[fx.Node] = set()
    sources: set[fx.Node] = set()
    rows = _calls(part, graph, row)
    waiting: list[Any] = [call.args[0] if len(call.args) == 1 and not call.kwargs else None for call in rows]
    while waiting:
        node = waiting.pop()
        if node in region or node in sources:
            continue
        if not isinstance(node, fx.Node):
            return None
        if node.op == "call_module" and part.plain(node.target) in candidates - {row}:
            sources.add(node)
        elif _elementwise(part, node):
            region.add(node)
            waiting += node.all_input_nodes
        else:
            return None
    columns = {part.plain(node.target) for node in sources}
    closed = all(user in region or user in rows for node in region | sources for user in node.users)
    between = [node for node in region if node.op == "call_module"]
    dropouts = {part.plain(n.target) for n in between if isinstance(_at(part, n), nn.Dropout)}
    inside = region | sources
    every = all(call in inside for name in columns | dropouts for call in _calls(part, graph, name))
    widths = {_at(part, node).out_features for node in sources}  # a width of 1 would be broadcast
    if not (columns and closed and every and len(widths) == 1):
        return None
    return Pair(tuple(sorted(columns)), row, tuple(sorted(dropouts)))


def _at(part: Traced, node: fx.Node) -> nn.Module:
    return part.model.get_submodule(str(node.target))


def is_elementwise(function: Any) -> bool:
    """Return whether a layer or a function treats each number by itself."""
    if isinstance(function, nn.Module):
        return type(function) in _LAYERS and not torch_private.hooked(function)
    return function in _FUNCTIONS


def _elementwise(part: Traced, node: fx.Node) -> bool:
    if node.op == "call_module":
        return is_elementwise(_at(part, node))
    return (node.op == "call_function" and node.target in _FUNCTIONS) or (
        node.op == "call_method" and node.target in _NAMES
    )


def output(traced: Sequence[Traced], candidates: set[str], seen: ForwardRecord, *, carried: bool) -> str | None:
    """The Linear layer whose outputs are the network's, its classes in dimension 1 as cross-entropy has them."""
    whole = [part for part in traced if not part.name]
    found = {_output(part, graph, candidates, seen.dims, carried=carried) for part in whole for graph in part.graphs}
    return found.pop() if len(found) == 1 else None


def _output(part: Traced, graph: fx.Graph, candidates: set[str], dims: dict[str, int], *, carried: bool) -> str | None:
    node: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    if carried:
        node = node[0] if isinstance(node, tuple) else None
    moves: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.op == "call_method" and len(node.users) == 1:
        moves.append(node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_module" or node.target not in candidates:
        return None
    name = str(node.target)
    if len(node.users) != 1 or len(_calls(part, graph, name)) != 1 or name not in dims:
        return None
    place: int | None = dims[name] - 1
    ndim = dims[name]
    for move in reversed(moves):
        place, ndim = _moved_to(move, place, ndim)
        if place is None:
            return None
    return name if place == 1 else None


def _moved_to(node: fx.Node, place: int | None, dims: int) -> tuple[int | None, int]:
    """The place to which a call moves a dimension, and the number of dimensions; None where that is not known."""
    given = [a for a in node.args[1:] if isinstance(a, int)]
    if place is None or node.kwargs or len(given) != len(node.args) - 1:
        return None, dims
    given = [a % dims for a in given]
    if node.target == "contiguous":
        return place, dims
    if node.target == "transpose":
        a, b = given
        return {a: b, b: a}.get(place, place), dims
    if node.target == "permute" and len(given) == dims:
        return given.index(place), dims
    if node.target == "flatten" and len(given) == 2 and given[1] < place:
        merged = given[1] - given[0]
        return place - merged, dims - merged
    return None, dims
