"""What of a network comes before its recurrent layers and what after, and which ranks hold which weights.

The forward pass is traced with torch.fx, the nn.LSTM, nn.GRU or nn.RNN as one node. What it takes its inputs from goes
to the rank of its first layer, what takes its outputs to the rank of its last one; the state that it begins in, and the
state that the model gives back, is computed on every rank. What does not fit that is refused by name.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer
from torch.fx.node import map_arg

from apportion.network import evaluating, undisturbed

KINDS = (nn.LSTM, nn.GRU, nn.RNN)
INSTEAD = "use data_parallel"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PACKING = ("pack_padded_sequence", "pack_sequence", "_pack_padded_sequence")


class _Whole(Tracer):
    """Recurrent layers stay one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.RNNBase) or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class Graphs:
    """The parts of one traced forward pass: each a list of nodes in order, and what they give."""

    names: Mapping[str, str]
    """The parameters of the model's forward by the name of their node."""
    node: Node
    """The recurrent layers."""
    before: list[Node]
    x: Any
    begun: list[Node]
    hx: Any
    """The state that they begin in."""
    after: list[Node]
    outputs: Any
    ended: list[Node]
    state: Any
    """What the model gives back to be carried on; None where nothing is."""
    uses_state: bool
    """Does what comes after take the state that they end in?"""

    @property
    def state_is_computed(self) -> bool:
        """Is the state that the model gives back made of more than the recurrent layers' own?"""
        return any(node.op == "placeholder" for own in self.ended for node in own.all_input_nodes)


@dataclass(frozen=True)
class Cut:
    """A model around its recurrent layers."""

    model: nn.Module
    path: str
    """Of the recurrent module in it."""
    training: Graphs
    evaluation: Graphs
    bind: Callable[..., dict[str, Any]]

    @property
    def net(self) -> nn.RNNBase:
        net = self.model.get_submodule(self.path)
        assert isinstance(net, nn.RNNBase)
        return net

    def arguments(self, inputs: Any, *state: Any) -> dict[str, Any]:
        """What the forward pass was given, by parameter. An input that nobody needs may be anything."""
        return self.bind(inputs, *state)

    def evaluate(self, nodes: list[Node], wanted: Any, graphs: Graphs, known: Mapping[str, Any], ran: Any) -> Any:
        """Run these nodes; ``ran``: what the recurrent layers gave."""
        values: dict[Node, Any] = {graphs.node: ran}

        def given(node: Node) -> Any:
            if node not in values and node.op == "placeholder":
                values[node] = known[graphs.names[node.name]]
            return values[node]

        for node in nodes:
            arguments, options = map_arg(node.args, given), map_arg(node.kwargs, given)
            values[node] = self._call(node, arguments, options)
        return map_arg(wanted, given)

    def _call(self, node: Node, arguments: Any, options: Any) -> Any:
        target: Any = node.target
        if node.op == "call_module":
            return self.model.get_submodule(target)(*arguments, **options)
        if node.op == "call_method":
            return getattr(arguments[0], target)(*arguments[1:], **options)
        if node.op == "get_attr":
            return _attribute(self.model, target)
        return target(*arguments, **options)

    def held(self, nodes: Iterable[Node]) -> set[str]:
        """The parameters and buffers that these nodes use, by every name they go by."""
        return _held(self.model, nodes)


def cut(model: nn.Module, inputs: Any, *, carries: bool) -> Cut:
    """A model for these inputs (``carries``: and a recurrent state) around its one recurrent module."""
    path = _recurrent(model)
    net = model.get_submodule(path)
    where = path or type(net).__name__
    _refuse_net(net, where)
    _refuse_sharing(model, net, where)
    bind = _binding(model, inputs, carries)

    def graphs() -> Graphs:
        graph = _by_hand(model, carries) if path == "" else _traced(model, bind(inputs, None)["concrete"], where)
        return _graphs(graph, model, path, carries)

    training = graphs()
    with evaluating(model.modules()):
        evaluation = graphs()
    return Cut(model, path, training, evaluation, lambda inputs, *state: bind(inputs, *state)["known"])


def _recurrent(model: nn.Module) -> str:
    """Where the one recurrent module is."""
    found: dict[str, nn.RNNBase] = {name: m for name, m in model.named_modules() if isinstance(m, nn.RNNBase)}
    if not found:
        cells = [name for name, m in model.named_modules() if isinstance(m, nn.RNNCellBase)]
        if cells:
            raise ValueError(
                f"{cells[0]} is called moment by moment in Python, and a wavefront needs the layers as one module: use "
                f"nn.LSTM, nn.GRU or nn.RNN, or {INSTEAD}"
            )
        raise ValueError(
            f"{type(model).__name__} has no nn.LSTM, nn.GRU or nn.RNN, and a wavefront runs through recurrent layers: "
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
            f"begin before the other has ended, and there is no wavefront; use bidirectional=False, or {INSTEAD}"
        )


def _refuse_sharing(model: nn.Module, net: nn.Module, where: str) -> None:
    """Layers that are on several ranks have their weights to themselves, and nobody looks over their shoulders."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for p in net.parameters():
        if len(names[id(p)]) > 1:
            raise ValueError(f"{' and '.join(names[id(p)][:2])} are one weight, and on two ranks: {INSTEAD}")
    for module, name in ((net, where), (model, type(model).__name__)):
        if any(getattr(module, kind) for kind in _HOOKS):
            raise ValueError(f"{name} has a hook, and no rank has all that it would see: remove it, or {INSTEAD}")


def _binding(model: nn.Module, sample: Any, carries: bool) -> Callable[..., dict[str, Any]]:
    """How the forward's parameters are bound to a batch's inputs, as ``tree.call`` passes them."""
    signature = inspect.signature(model.forward)

    def bind(inputs: Any, *state: Any) -> dict[str, Any]:
        arguments: tuple[Any, ...] = (inputs,)
        options: dict[str, Any] = {}
        if isinstance(sample, tuple | list):
            arguments = tuple(inputs) if inputs is not None else (None,) * len(sample)
        elif isinstance(sample, dict):
            arguments, options = (), dict(inputs) if inputs is not None else dict.fromkeys(sample)
        if carries and isinstance(sample, dict):
            options["state"] = state[0]
        elif carries:
            arguments += state[:1]
        bound = signature.bind(*arguments, **options)
        defaults = {n: p.default for n, p in signature.parameters.items() if n not in bound.arguments}
        concrete = {n: value for n, value in defaults.items() if value is not inspect.Parameter.empty}
        return {"known": {**concrete, **bound.arguments}, "concrete": concrete}

    return bind


def _traced(model: nn.Module, concrete: dict[str, Any], where: str) -> Graph:
    with undisturbed(model) as changed:
        graph = _graph(model, concrete, where)
        if named := changed():
            raise ValueError(
                f"the forward of {type(model).__name__} changes its own {named[0]}, which would happen once, when "
                f"it is traced: put it into a layer of its own, or {INSTEAD}"
            )
    return graph


def _graph(model: nn.Module, concrete: dict[str, Any], where: str) -> Graph:
    try:
        return _Whole().trace(model, concrete_args=concrete)
    except Exception as error:
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if names & {*_PACKING}:
            raise _packed(where) from error
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the forward of {type(model).__name__} cannot be traced ({first}), so what comes before {where} and what "
            f"after is unknown: write it without branches and loops over values, or {INSTEAD}"
        ) from error


def _packed(where: str) -> ValueError:
    return ValueError(
        f"{where} gets sequences of different lengths (a PackedSequence), whose rows end at different chunks: pad them "
        f"and leave the padding out of the loss (count=), or {INSTEAD}"
    )


def _by_hand(model: nn.Module, carries: bool) -> Graph:
    """Of a model that is the recurrent module itself."""
    graph = Graph()
    x = graph.placeholder("input")
    arguments = (x, graph.placeholder("hx")) if carries else (x,)
    graph.output(graph.call_module("", arguments))
    return graph


def _above(wanted: Any, stop: Node) -> set[Node]:
    """All nodes that these need, but for the recurrent one and what it needs."""
    seen: set[Node] = set()
    waiting: list[Node] = []
    map_arg(wanted, waiting.append)
    while waiting:
        node = waiting.pop()
        if node not in seen and node is not stop:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _graphs(graph: Graph, model: nn.Module, path: str, carries: bool) -> Graphs:
    where = path or type(model).__name__
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _PACKING:
            raise _packed(where)
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == path]
    if len(calls) != 1:
        raise ValueError(f"{where} is called {len(calls)} times in a forward pass, and is cut once: {INSTEAD}")
    net = calls[0]
    x = net.args[0] if net.args else net.kwargs["input"]
    hx = net.args[1] if len(net.args) > 1 else net.kwargs.get("hx")
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs, state = _returned(output, net, carries, where)
    wanted = {"before": x, "begun": hx, "after": outputs, "ended": state}
    needs = {name: _above(value, net) for name, value in wanted.items()}
    _refuse_graph(needs, net, model, where)
    _refuse_unread(graph, set().union(*needs.values()), net)
    runs = {name: [n for n in graph.nodes if n in nodes and n.op != "placeholder"] for name, nodes in needs.items()}
    taken: list[Node] = []
    map_arg(outputs, taken.append)
    uses_state = net in taken or any(_item(n) != 0 for n in net.users if n in needs["after"])
    if path == "" and not carries:
        uses_state = True
    names = {n.name: str(n.target) for n in graph.nodes if n.op == "placeholder"}
    return Graphs(
        names=names,
        node=net,
        before=runs["before"], x=x,
        begun=runs["begun"], hx=hx,
        after=runs["after"], outputs=outputs,
        ended=runs["ended"], state=state,
        uses_state=uses_state,
    )  # fmt: skip


def _item(node: Node) -> Any:
    """Which of what a node gives another one takes; None: not one by its number."""
    is_item = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
    return node.args[1] if is_item else None


def _returned(output: Node, net: Node, carries: bool, where: str) -> tuple[Any, Any]:
    """The nodes of the outputs, and of the state that is carried on."""
    returned = output.args[0]
    if not carries:
        return returned, None
    if returned is net:  # a model that is the recurrent module itself
        with net.graph.inserting_before(output):
            items = [net.graph.call_function(_take, (net, i)) for i in range(2)]
        return items[0], items[1]
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(f"with carry= the model gives (outputs, state), and what it gives around {where} is no pair")
    outputs, state = returned
    return outputs, state


def _take(pair: Any, i: int) -> Any:
    return pair[i]


_take.__name__ = "getitem"


def _refuse_graph(needs: Mapping[str, set[Node]], net: Node, model: nn.Module, where: str) -> None:
    for name, what in (("begun", "begins in"), ("ended", "ends in, as the model gives it back,")):
        bad = [n for n in needs[name] if not _is_free(n, model)]
        if bad:
            raise ValueError(
                f"the state that {where} {what} goes through {_called(bad[0])}, which has weights or draws, and every "
                f"rank needs that state: {INSTEAD}"
            )
    if any(_item(n) == 0 for n in net.users if n in needs["ended"]):
        raise ValueError(
            f"the state that the model gives back is made of the outputs of {where}, which the last rank alone has: "
            f"give back the state that {where} gives, or {INSTEAD}"
        )
    for node in (n for n in needs["before"] & needs["after"] if not _is_free(n, model)):
        raise ValueError(
            f"{_called(node)} comes before {where}, and what comes after takes its outputs too, on another rank: a "
            f"connection around {where} cannot be cut; {INSTEAD}"
        )


def _refuse_unread(graph: Graph, known: set[Node], net: Node) -> None:
    """What is done to a tensor in place, and not by its result, is in none of the parts."""
    for node in graph.nodes:
        if node in known or node is net or not node.op.startswith("call_"):
            continue
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or node.kwargs.get("inplace") or name in ("setitem", "iadd", "imul", "isub", "itruediv"):
            raise ValueError(
                f"{name}() changes a tensor in place, and its result is not used: which part it belongs to is unknown; "
                f"use what it gives (x = x.{name}(...)), or {INSTEAD}"
            )


def _called(node: Node) -> str:
    return str(node.target) if node.op in ("call_module", "get_attr") else node.name


_DRAWING = ("dropout", "rand", "normal", "bernoulli", "multinomial", "poisson", "uniform")


def _is_free(node: Node, model: nn.Module) -> bool:
    """Has it no weights, and draws nothing, so that any rank may compute it?"""
    if _held(model, [node]):
        return False
    name = str(node.target) if node.op != "call_function" else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        name = type(model.get_submodule(str(node.target))).__name__
    return not any(word in name.lower() for word in _DRAWING)


def _held(model: nn.Module, nodes: Iterable[Node]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        target = str(node.target)
        if node.op == "call_module":
            module = model.get_submodule(target)
            own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            names |= {f"{target}.{name}".lstrip(".") for name, _ in own}
        elif node.op == "get_attr" and isinstance(_attribute(model, target), Tensor):
            names.add(target)
    return names


def _attribute(model: nn.Module, target: str) -> Any:
    found: Any = model
    for name in target.split("."):
        found = getattr(found, name)
    return found
