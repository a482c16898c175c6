"""A network in two parts, one after the other: everything that does not depend on some layers, and the rest.

::

    inputs -- features -- flatten --|-- classifier -- outputs
                  front             cut      back

Both call the network's own layers; between them go tensors whose dimension 0 is the example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from apportion import tree
from apportion.graph import Unfollowed, follow


@dataclass(frozen=True)
class Parts:
    """The two parts, as the network trains or as it evaluates."""

    front: fx.GraphModule
    """Called as the network is; a tuple of tensors."""
    back: fx.GraphModule
    """Called with these; the network's outputs."""
    front_calls: frozenset[str]
    """Names of the layers that the front calls."""
    back_calls: frozenset[str]
    front_uses: frozenset[nn.Parameter]
    back_uses: frozenset[nn.Parameter]


def cut(model: nn.Module, graph: fx.Graph, is_back: Callable[[str], bool]) -> Parts:
    """``is_back``: of a layer's name. What depends on such a layer is in the back."""
    back: set[fx.Node] = set()
    fixed = _fixed(graph)
    for node in graph.nodes:
        begins = node.op == "call_module" and is_back(str(node.target))
        if begins or node.op == "output" or any(given in back for given in node.all_input_nodes):
            back.add(node)
    back -= fixed
    front = set(graph.nodes) - back - fixed
    crossing = [node for node in graph.nodes if node in front and any(user in back for user in node.users)]
    return Parts(
        front=fx.GraphModule(model, _front(graph, _with_fixed(front, fixed), crossing), type(model).__name__),
        back=fx.GraphModule(model, _back(graph, _with_fixed(back, fixed), crossing)),
        front_calls=_calls(front),
        back_calls=_calls(back),
        front_uses=_uses(model, _with_fixed(front, fixed)),
        back_uses=_uses(model, _with_fixed(back, fixed)),
    )


def unfollowed(model: nn.Module, inputs: Any) -> str:
    """Why there is no graph that does all that the network does, with the layer that is in the way."""
    try:
        follow(model, inputs, opaque=lambda _: False, writes=False)
    except Unfollowed as error:
        return str(error)
    return f"the forward of {type(model).__name__} cannot be followed: it does something else when it evaluates"


def _fixed(graph: fx.Graph) -> set[fx.Node]:
    """What depends on no inputs: weights, and what is made of them; it is wherever it is used."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        made = node.op in ("get_attr", "call_function", "call_method")
        if made and all(given in found for given in node.all_input_nodes):
            found.add(node)
    return found


def _with_fixed(nodes: set[fx.Node], fixed: set[fx.Node]) -> set[fx.Node]:
    found, waiting = set(nodes), list(nodes)
    while waiting:
        needed = [given for given in waiting.pop().all_input_nodes if given in fixed and given not in found]
        found.update(needed)
        waiting += needed
    return found


def _calls(nodes: Iterable[fx.Node]) -> frozenset[str]:
    return frozenset(str(node.target) for node in nodes if node.op == "call_module")


def _uses(model: nn.Module, nodes: Iterable[fx.Node]) -> frozenset[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for node in nodes:
        if node.op == "call_module":
            found |= set(model.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(model.get_submodule(owner), name)
            found |= {value} if isinstance(value, nn.Parameter) else set()
    return frozenset(found)


def _front(graph: fx.Graph, nodes: set[fx.Node], crossing: Sequence[fx.Node]) -> fx.Graph:
    made = fx.Graph()
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in nodes:
            of[node] = made.node_copy(node, of.__getitem__)
    made.output(tuple(of[node] for node in crossing))
    return made


def _back(graph: fx.Graph, nodes: set[fx.Node], crossing: Sequence[fx.Node]) -> fx.Graph:
    made = fx.Graph()
    of = {node: made.placeholder(f"crossing_{number}") for number, node in enumerate(crossing)}
    for node in graph.nodes:
        if node in nodes:
            of[node] = made.node_copy(node, of.__getitem__)
    return made


@torch.no_grad()
def what_crosses(parts: Parts, inputs: Any) -> str | None:
    """Of a network that evaluates: what crosses the cut and is no tensor of one row an example; None: nothing does."""
    for rows in (1, 2):
        few = tree.rows(inputs, slice(0, rows))
        for value in tree.call(parts.front, few):
            if not isinstance(value, Tensor):
                return f"a value of type {type(value).__name__}"
            if value.dim() == 0 or len(value) != tree.length(few):
                return f"a tensor of shape {tuple(value.shape)} of {tree.length(few)} examples"
    return None
