"""A model's own ``forward`` on strips: it is traced once, and every operation is replaced by what it is on a strip.

::

    model(x)  --torch.fx-->  x -> conv1 -> relu -> conv2 -> add -> flatten -> linear -> output
                                  cut      each rank its rows, halos between          summed, the same on every rank

A value is whole, the same on every rank, or a ``SpatialShard``. What is not known to be right on a strip is
refused by name, on the first run, which is made before any training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from apportion.comm.group import Group, collective
from apportion.core import torch_private, tree
from apportion.core.data.batch import rows_of
from apportion.core.modes import evaluating
from apportion.core.torch_private import ConvBase
from apportion.cost_model.constraints import nothing_to_divide
from apportion.errors import ApportionError
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.spatial.call_arguments import function_of, refuse_shared_writes
from apportion.parallel.spatial.layers import LAYER_CALLS, LAYERS, ask_all_ranks, known_calls
from apportion.parallel.spatial.placements import SpatialPlan
from apportion.parallel.spatial.strip import SpatialShard, gathered
from apportion.parallel.spatial.windows import Layer, divides
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.nodes import attribute, target_name
from apportion.parallel.tracing.tracer import Unfollowed, follow, said_here

OTHERS = "data_parallel, or layer_placement"
"""The strategies that work for any layer."""
_CALLS = {**known_calls(), **LAYER_CALLS}


@collective
def cut_network(model: nn.Module, sample: Any, group: Group, split: str) -> dict[str, TensorShard]:
    """Make ``model`` run on the ranks of the group together, called with the whole batch on each of them, from now on;
    returns what this rank holds of it, by plain name. Called by all ranks."""
    forward = StripForward(model, sample, group, split)
    pieces = forward.plan(sample)
    model.forward = forward
    return pieces


@final
class StripForward:
    """A model's ``forward`` on the ranks of a group."""

    def __init__(self, model: nn.Module, sample: Any, group: Group, split: str) -> None:
        self._model, self._group = model, group
        self._plan = SpatialPlan(model, group, split)
        self._trained = _traced(model, sample)
        with evaluating(model.modules()):
            self._evaluated = _traced(model, sample)
        self._dead = _last_uses(self._trained) | _last_uses(self._evaluated)
        self._layers = dict(model.named_modules())
        self._known = {name: LAYERS.get(type(layer)) for name, layer in self._layers.items()}  # some change their class
        self._divided = False

    @torch.no_grad()
    def plan(self, sample: Any) -> dict[str, TensorShard]:
        """Run the model once, on an example, to see what is used where; then keep no more than this rank needs."""
        with evaluating(self._model.modules()), undisturbed(self._model):
            example = rows_of(sample, slice(0, 1))
            tree.call(lambda *a, **k: self._run(self._evaluated, a, k), example)
            tree.call(lambda *a, **k: self._run(self._trained, a, k), example)
        if not self._divided:
            raise ValueError(nothing_to_divide(type(self._model).__name__))
        if self._plan.split == "group" and not self._plan.grouped:
            raise ValueError('the network has no convolution with groups: use split="channel", or data_parallel')
        pieces = self._plan.cut()
        for layer in dict.fromkeys(self._plan.norms):
            ask_all_ranks(layer, self._plan.attendance)
        return pieces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._trained if self._model.training else self._evaluated, args, kwargs)

    def _run(self, graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values: dict[Node, Any] = {}
        given = iter(args)
        uncut: set[Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = _argument(node, given, kwargs)
            elif node.op == "get_attr":
                values[node] = attribute(self._model, node.target)
            elif node.op == "output":
                return map_arg(node.args[0], lambda n: self._whole(values[n]))
            else:
                values[node] = self._call(node, values, uncut)
            if not isinstance(values[node], SpatialShard) and uncut.issuperset(node.all_input_nodes):
                uncut.add(node)
            for used in self._dead[node]:
                del values[used]
        raise AssertionError("a graph ends in its output")

    def _whole(self, value: Any) -> Any:
        return gathered(value, self._group) if isinstance(value, SpatialShard) else value

    def _call(self, node: Node, values: Mapping[Node, Any], uncut: set[Node]) -> Any:
        strips = False

        def load(of: Node) -> Any:
            nonlocal strips
            value = values[of]
            strips = strips or _has_strips(value)
            return value

        args, kwargs = map_arg(node.args, load), map_arg(node.kwargs, load)
        target: Any = self._layers[str(node.target)] if node.op == "call_module" else node.target
        begins = divides(target, spatial=self._plan.spatial) and (
            not self._plan.spatial or uncut.issuperset(node.all_input_nodes)
        )
        if not strips and not begins:
            return self._alike(node, target, args, kwargs)
        self._divided = self._divided or begins
        try:
            if self._plan.planning:
                refuse_shared_writes(node, self._layers)
            if node.op == "call_module":
                return self._known_layer(str(node.target), target)(self._plan, target, *args, **kwargs)
            if target not in _CALLS:
                raise ValueError(
                    "it is not known to be right where each rank has a part of the image; "
                    f"use {OTHERS}, or call it once the image is flat"
                )
            return _CALLS[target](self._plan, target, args, kwargs)
        except ApportionError:
            raise
        except Exception as error:  # torch's own, too: what it would not take is not to be met in the middle of a run
            if not self._plan.planning:
                raise
            why = str(error) if said_here(error) else "torch does not compute it on a part of what it is given"
            cure = "" if "use " in why else f"; use {OTHERS}"
            raise ValueError(f'{_place(node)} cannot be cut (split="{self._plan.split}"): {why}{cure}') from error

    def _known_layer(self, name: str, layer: nn.Module) -> Layer:
        """The function that is run instead of the layer, where this is one of torch's as it was made; else
        ValueError."""
        known = self._known[name]
        if known is None:
            raise ValueError(
                f"{type(layer).__name__} is not known to be right where each rank has a part of the image; use {OTHERS}"
            )
        if self._plan.planning and torch_private.hooked(layer):
            raise ValueError(f"it has a hook, which would see a part of the image; use {OTHERS}")
        return known

    def _alike(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the plain operation on what every rank has."""
        if self._plan.planning:
            if node.op == "call_module":
                self._plan.used_alike(target)
            for value in tree.tensors((args, kwargs)):
                self._plan.used_alike(value)
        return (target if node.op == "call_module" else function_of(target))(*args, **kwargs)


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """The values that are not needed after a node, by node."""
    dead: dict[Node, list[Node]] = {node: [] for node in graph.nodes}
    seen: set[Node] = set()
    for node in reversed(graph.nodes):
        dead[node] = [used for used in (*node.all_input_nodes, node) if used not in seen]
        seen.update(dead[node])
    return dead


def _has_strips(value: Any) -> bool:
    if type(value) is SpatialShard:
        return True
    return type(value) in (list, tuple) and any(type(v) is SpatialShard for v in value)


def _argument(node: Node, given: Any, kwargs: Mapping[str, Any]) -> Any:
    """The value of an argument of the model's, as the model was called."""
    name = str(node.target)
    if name.startswith("*"):
        raise ValueError(f"the network takes {name}: write its arguments out, or use {OTHERS}")
    default = node.args[0] if node.args else None
    return kwargs[name] if name in kwargs else next(given, default)


def _place(node: Node) -> str:
    """The place of a node in the model: a layer's name, or the function and the module that calls it."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    owner = stack[-1][0] if stack else ""
    name = target_name(node)
    return f"{name}() in {owner}" if owner else f"{name}() in the network's forward"


def _traced(model: nn.Module, sample: Any) -> Graph:
    try:
        return follow(model, sample, opaque=_may_be_whole, writes=False)
    except Unfollowed as error:
        if not any(isinstance(layer, ConvBase) or divides(layer, spatial=True) for layer in model.modules()):
            raise ValueError(nothing_to_divide(type(model).__name__)) from error
        where = error.path or type(model).__name__
        if error.does is not None:
            raise ValueError(
                f"the forward of {where} {error.does}, which would happen once, when it is traced, and not in each "
                f"step; put it into a layer of its own, or use {OTHERS}"
            ) from error
        raise ValueError(
            f"{where}.forward cannot be traced ({error.why}): conv_parallel must see every operation of it, without "
            f"branches that depend on values; rewrite it, or use {OTHERS}"
        ) from error


def _may_be_whole(module: nn.Module) -> bool:
    """Return whether a module that cannot be followed has nothing in it to be cut, so that it is right where it gets
    whole tensors."""
    return not any(type(inside) in LAYERS and divides(inside, spatial=True) for inside in module.modules())
