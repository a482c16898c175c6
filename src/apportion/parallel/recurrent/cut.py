"""A network cut around its recurrent layers: its graph has the nn.LSTM, nn.GRU or nn.RNN as one node, and each rank
runs the parts of it (``recurrent/graph.py``) that it needs. What cannot be cut is refused by name.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from apportion.core import torch_private, tree
from apportion.core.data.batch import rows_of
from apportion.core.modes import evaluating
from apportion.parallel.recurrent.graph import INSTEAD, PACKING, Graphs, packed, parts, used_names
from apportion.parallel.replica.initial_model import memory_of
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.nodes import attribute, called
from apportion.parallel.tracing.tracer import Unfollowed, follow, of_torch

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


@dataclass(frozen=True)
class Cut:
    """A model around its recurrent layers."""

    model: nn.Module
    path: str
    """The path of the recurrent module in the model."""
    training: Graphs
    evaluation: Graphs
    bind: Callable[..., dict[str, Any]]

    @property
    def net(self) -> nn.RNNBase:
        net = self.model.get_submodule(self.path)
        assert isinstance(net, nn.RNNBase)
        return net

    def arguments(self, inputs: Any, *state: Any) -> dict[str, Any]:
        """The arguments that the forward pass was given, by parameter. An input that is not needed may be anything."""
        return self.bind(inputs, *state)

    def evaluate(self, nodes: list[Node], wanted: Any, graphs: Graphs, known: Mapping[str, Any], ran: Any) -> Any:
        """Run these nodes. ``ran``: what the recurrent layers gave."""
        values: dict[Node, Any] = {graphs.node: ran}

        def given(node: Node) -> Any:
            if node not in values and node.op == "placeholder":
                values[node] = known[graphs.names[node.name]]
            return values[node]

        for node in nodes:
            arguments, options = map_arg(node.args, given), map_arg(node.kwargs, given)
            if node.op == "get_attr":
                values[node] = attribute(self.model, node.target)
            else:
                values[node] = called(self.model, node)(*arguments, **options)
        return map_arg(wanted, given)

    def used_names(self, nodes: Iterable[Node]) -> set[str]:
        """The parameters and buffers that these nodes use, by every name they go by."""
        return used_names(self.model, nodes)


def cut(model: nn.Module, inputs: Any, *, carry: Callable[[int], Any] | None) -> Cut:
    """Cut a model for these inputs around its one recurrent module. ``carry``: gives the recurrent state of a number
    of rows; None: the inputs have none."""
    carries = carry is not None
    path = _recurrent(model)
    net = model.get_submodule(path)
    where = path or type(net).__name__
    _refuse_net(net, where)
    _refuse_sharing(model, net, where)
    bind = _binding(model, inputs, carries)

    def graphs() -> Graphs:
        graph = _by_hand(model, carries) if path == "" else _traced(model, path, bind(inputs, None)["concrete"])
        return parts(graph, model, path, carries)

    training = graphs()
    with evaluating(model.modules()):
        evaluation = graphs()
    made = Cut(model, path, training, evaluation, lambda inputs, *state: bind(inputs, *state)["known"])
    _refuse_changing(made, inputs, where, carry)
    return made


def _refuse_changing(made: Cut, inputs: Any, where: str, carry: Callable[[int], Any] | None) -> None:
    """Refuse a forward that changes a tensor which is used before and after the recurrent layers: each side is on a
    rank of its own."""
    model = made.model
    with undisturbed(model) as changed:
        few = rows_of(inputs, slice(0, 2))
        tree.call(model, few, *(() if carry is None else (carry(tree.length(few)),)))
        names = changed()
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    before, after = (
        {
            memory_of(tensors[name])
            for graphs in (made.training, made.evaluation)
            for name in made.used_names(nodes(graphs))
        }
        for nodes in (attrgetter("before"), attrgetter("after"))
    )
    for name in names:
        if name in tensors and memory_of(tensors[name]) in before & after:
            raise ValueError(
                f"{name}, which the forward changes, is used before {where} and after it, on two ranks: {INSTEAD}"
            )


def _recurrent(model: nn.Module) -> str:
    """The path of the one recurrent module; ValueError where there is none, or several."""
    found: dict[str, nn.RNNBase] = {name: m for name, m in model.named_modules() if isinstance(m, nn.RNNBase)}
    if not found:
        cells = [name for name, m in model.named_modules() if isinstance(m, nn.RNNCellBase)]
        if cells:
            raise ValueError(
                f"{cells[0]} is called moment by moment in Python, and a wavefront needs the layers as one module: use "
                f"nn.LSTM, nn.GRU or nn.RNN, or {INSTEAD}"
            )
        raise ValueError(
            f"{type(model).__name__} has no nn.LSTM, nn.GRU or nn.RNN, and wavefront_parallel runs through these: "
            "use pipeline_parallel, layer_placement or data_parallel"
        )
    if len(found) > 1:
        names = list(found)
        raise ValueError(
            f"{' and '.join(names[:2])} are recurrent modules apart, and one is cut: make them one with "
            f"num_layers={sum(m.num_layers for m in found.values())}, or use layer_placement or data_parallel"
        )
    return next(iter(found))


def _refuse_net(net: nn.Module, where: str) -> None:
    assert isinstance(net, nn.RNNBase)
    if type(net) not in KINDS:
        raise ValueError(f"{where} is a {type(net).__name__} of your own, whose layers are unknown: use {INSTEAD[4:]}")
    if net.bidirectional:
        raise ValueError(
            f"{where} is bidirectional: each layer begins with the last moment of the one below, so that no layer can "
            f"begin before the other has ended, and no wavefront is possible; use bidirectional=False, or {INSTEAD}"
        )


def _refuse_sharing(model: nn.Module, net: nn.Module, where: str) -> None:
    """Refuse a recurrent module that shares a weight with other layers, since its layers are on several ranks, and
    hooks on it or on the model, since no rank has all that they would see."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for p in net.parameters():
        if len(names[id(p)]) > 1:
            raise ValueError(f"{' and '.join(names[id(p)][:2])} are one weight, and on two ranks: {INSTEAD}")
    for module, name in ((net, where), (model, type(model).__name__)):
        if torch_private.hooked(module):
            raise ValueError(f"{name} has a hook, and no rank has all that it would see: remove it, or {INSTEAD}")


def _binding(model: nn.Module, sample: Any, carries: bool) -> Callable[..., dict[str, Any]]:
    """A function that binds the forward's parameters to a batch's inputs, as ``tree.call`` passes them."""
    signature = inspect.signature(model.forward)

    def bind(inputs: Any, *state: Any) -> dict[str, Any]:
        arguments, options = tree.arguments(sample if inputs is None else inputs)
        if inputs is None:  # a stage that gets none of them
            arguments, options = (None,) * len(arguments), dict.fromkeys(options)
        if carries and options:
            options["state"] = state[0]
        elif carries:
            arguments += state[:1]
        bound = signature.bind(*arguments, **options)
        defaults = {n: p.default for n, p in signature.parameters.items() if n not in bound.arguments}
        concrete = {n: value for n, value in defaults.items() if value is not inspect.Parameter.empty}
        return {"known": {**concrete, **bound.arguments}, "concrete": concrete}

    return bind


def _traced(model: nn.Module, path: str, known: dict[str, Any]) -> Graph:
    net = model.get_submodule(path)
    try:
        return follow(
            model,
            known=known,
            whole=lambda path, m: isinstance(m, nn.RNNBase) or of_torch(path, m),
            opaque=lambda m: net not in m.modules(),
            writes=False,
        )
    except Unfollowed as error:
        where = error.path or type(model).__name__
        if error.does is not None:
            raise ValueError(
                f"the forward of {where} {error.does}, which would happen once, when it is traced: put it into a layer "
                f"of its own, or {INSTEAD}"
            ) from error
        if error.__cause__ is not None:
            frames = {frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)}
            if frames & {*PACKING}:
                raise packed(path) from error
        raise ValueError(
            f"the forward of {where} cannot be traced ({error.why}), so what comes before {path} and what after is "
            f"unknown: write it without branches and loops over values, or {INSTEAD}"
        ) from error


def _by_hand(model: nn.Module, carries: bool) -> Graph:
    """The graph of a model that is the recurrent module itself."""
    graph = Graph()
    x = graph.placeholder("input")
    arguments = (x, graph.placeholder("hx")) if carries else (x,)
    graph.output(graph.call_module("", arguments))
    return graph
