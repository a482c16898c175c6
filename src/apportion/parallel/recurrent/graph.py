"""The graph of a network around its recurrent layers, in parts: what comes before them, what after, and the states.

What the recurrent layers take their inputs from goes to the rank of the first one, what takes their outputs to the rank
of the last one; the state that they begin in, and the state that the model gives back, is computed on every rank. What
does not fit that is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from apportion.parallel.tracing.nodes import attribute, target_name
from apportion.parallel.tracing.tracer import in_place, of_torch

INSTEAD = "use data_parallel"
PACKING = ("pack_padded_sequence", "pack_sequence", "_pack_padded_sequence")


@dataclass(frozen=True)
class Graphs:
    """The parts of one traced forward pass: each a list of nodes in order, and what they give."""

    names: Mapping[str, str]
    """The parameters of the model's forward by the name of their node."""
    node: Node
    """The node of the recurrent layers."""
    before: list[Node]
    x: Any
    begun: list[Node]
    hx: Any
    """The state that the recurrent layers begin in."""
    after: list[Node]
    outputs: Any
    ended: list[Node]
    state: Any
    """The state that the model gives back to be carried on; None where none is."""
    uses_state: bool
    """True if what comes after takes the state that the recurrent layers end in."""

    @property
    def state_is_computed(self) -> bool:
        """True if the state that the model gives back is made of more than the recurrent layers' own."""
        return any(node.op == "placeholder" for own in self.ended for node in own.all_input_nodes)


def packed(where: str) -> ValueError:
    """The error that refuses sequences of different lengths."""
    return ValueError(
        f"{where} gets sequences of different lengths (a PackedSequence), whose rows end at different chunks: pad them "
        f"and leave the padding out of the loss (count=), or {INSTEAD}"
    )


def _above(wanted: Any, stop: Node) -> set[Node]:
    """All nodes that the wanted ones need, but for the recurrent one and what it needs."""
    seen: set[Node] = set()
    waiting: list[Node] = []
    map_arg(wanted, waiting.append)
    while waiting:
        node = waiting.pop()
        if node not in seen and node is not stop:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def parts(graph: Graph, model: nn.Module, path: str, carries: bool) -> Graphs:
    """The parts of the graph of a model with recurrent layers under this path."""
    where = path or type(model).__name__
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in PACKING:
            raise packed(where)
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
    """The number of the item that a node takes of what another gives; None: it does not take one by its number."""
    is_item = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
    return node.args[1] if is_item else None


def _returned(output: Node, net: Node, carries: bool, where: str) -> tuple[Any, Any]:
    """The nodes of the outputs, and of the state that is carried on."""
    returned = output.args[0]
    if not carries:
        return returned, None
    if returned is net:  # a model that is the recurrent module itself
        with net.graph.inserting_before(output):
            items = [net.graph.call_function(_select, (net, i)) for i in range(2)]
        return items[0], items[1]
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(
            f"with carry= the model gives (outputs, state), and what it gives around {where} is not a pair"
        )
    outputs, state = returned
    return outputs, state


def _select(pair: Any, i: int) -> Any:
    return pair[i]


_select.__name__ = "getitem"


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
    """Refuse a tensor that is changed in place where the result of that is not used: the change would be in none of the
    parts."""
    for node in graph.nodes:
        if node in known or node is net or not node.op.startswith("call_"):
            continue
        if in_place(node):
            name = target_name(node)
            raise ValueError(
                f"{name}() changes a tensor in place, and its result is not used: which part it belongs to is unknown; "
                f"use what it gives (x = x.{name}(...)), or {INSTEAD}"
            )


def _called(node: Node) -> str:
    return str(node.target) if node.op in ("call_module", "get_attr") else node.name


_DRAWING = ("dropout", "rand", "normal", "bernoulli", "multinomial", "poisson", "uniform")


def _is_free(node: Node, model: nn.Module) -> bool:
    """Return whether a node has no weights and draws nothing, so that any rank may compute it."""
    if used_names(model, [node]):
        return False
    name = target_name(node)
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if not of_torch("", module):  # that could not be followed
            return False
        name = type(module).__name__
    return not any(word in name.lower() for word in _DRAWING)


def used_names(model: nn.Module, nodes: Iterable[Node]) -> set[str]:
    """The parameters and buffers that these nodes use, by every name they go by."""
    names: set[str] = set()
    for node in nodes:
        target = str(node.target)
        if node.op == "call_module":
            module = model.get_submodule(target)
            own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            names |= {f"{target}.{name}".lstrip(".") for name, _ in own}
        elif node.op == "get_attr" and isinstance(attribute(model, target), Tensor):
            names.add(target)
    return names
