"""Graphs that a program computes right which visits nodes depth first.

nirtorch's ``GraphExecutor``, by which sinabs and norse run a file, computes the nodes in the order in which a walk
meets them that follows the first edge of each node to its end before the second::

    n0 --> a --> n1 --> b --> n2 --> ...         computed: n0 a n1 b n2 ... s
     `-----------> s --------^                   the sum in n2 is without s, and no error is raised

Whichever branch is first, n2 is computed before the other one. A synapse whose weights are all zero cures that: it adds
nothing, and leads the walk from the end of one branch to the beginning of the other::

    n0 --> s --> z --> a --> n1 --> b --> n2     s also goes to n2, n0 also goes to a
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import torch

from apportion.exporting.spiking.graph import Convolution, Dense, Node, SpikingGraph, layer_of

Edge = tuple[str, str]
_LARGEST_KERNEL = 3


def depth_first(first: str, edges: Sequence[Edge]) -> list[str]:
    """Return the order in which such a program computes the nodes; the edges of a node are followed as they stand."""
    order: list[str] = []
    met: set[str] = set()
    waiting = [first]
    following: dict[str, list[str]] = {}
    for source, to in edges:
        following.setdefault(source, []).append(to)
    while waiting:
        name = waiting.pop()
        if name not in met:
            met.add(name)
            order.append(name)
            waiting.extend(reversed(following.get(name, [])))
    return order


def too_early(first: str, edges: Sequence[Edge]) -> Edge | None:
    """Return an edge whose end such a program computes before its beginning; None: there is none."""
    place = {name: number for number, name in enumerate(depth_first(first, edges))}
    return next((edge for edge in edges if place[edge[0]] > place[edge[1]]), None)


def led_depth_first(graph: SpikingGraph) -> SpikingGraph:
    """Return the graph, with synapses of zeros where they are needed, in whose order of edges such a program computes
    every node after all that flows into it. Raises ValueError, with the layer's name, where no synapse leads on."""
    order = _order(graph)
    edges = set(graph.edges)
    nodes: list[Node] = []
    for number, node in enumerate(order):
        before = order[number - 1] if number else None
        if before is not None and (before.name, node.name) not in edges:
            leading = _leading(graph, before, node)
            nodes.append(leading)
            edges |= {(before.name, leading.name), (leading.name, node.name)}
        nodes.append(node)
    place = {node.name: number for number, node in enumerate(nodes)}
    in_order = tuple(sorted(edges, key=lambda edge: (place[edge[0]], place[edge[1]])))
    assert too_early(nodes[0].name, in_order) is None
    return replace(graph, nodes=tuple(nodes), edges=in_order)


def without_zeros(graph: SpikingGraph) -> SpikingGraph:
    """Return the graph without synapses of zeros that add to what flows by other edges."""
    gone = {node.name for node in graph.nodes if _is_zero(node) and _adds_only(graph, node.name)}
    if not gone:
        return graph
    return replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.name not in gone),
        edges=tuple(edge for edge in graph.edges if not gone & set(edge)),
    )


def _is_zero(node: Node) -> bool:
    return isinstance(node, Dense | Convolution) and not bool(node.weight.any()) and not bool(node.bias.any())


def _adds_only(graph: SpikingGraph, name: str) -> bool:
    return all(any(not _is_zero(other) for other in graph.into(to.name)) for to in graph.out_of(name))


def _order(graph: SpikingGraph) -> list[Node]:
    """Return a topological order that follows an edge wherever one leads on."""
    missing = {node.name: len(graph.into(node.name)) for node in graph.nodes}
    order: list[Node] = []
    ready: list[Node] = [graph.source]
    while ready:
        led = {node.name for node in graph.out_of(order[-1].name)} if order else set()
        node = next((one for one in reversed(ready) if one.name in led), ready[-1])
        ready.remove(node)
        order.append(node)
        for following in graph.out_of(node.name):
            missing[following.name] -= 1
            if not missing[following.name]:
                ready.append(following)
    return order


def _leading(graph: SpikingGraph, before: Node, node: Node) -> Node:
    """Return a synapse of zeros from one node to another."""
    comes, goes = before.shape, graph.into(node.name)[0].shape
    name = _unused(f"lead_to_{node.name}", (one.name for one in graph.nodes))
    dtype = next((one.weight.dtype for one in graph.nodes if isinstance(one, Dense | Convolution)), torch.float32)
    bias = torch.zeros(goes[0], dtype=dtype)
    if len(comes) == len(goes) == 1:
        return Dense(name=name, shape=goes, weight=bias.new_zeros(goes[0], comes[0]), bias=bias)
    if len(comes) == len(goes) == 3:
        for kernel in range(1, _LARGEST_KERNEL + 1):
            ways = [_way(a, b, kernel) for a, b in zip(comes[1:], goes[1:], strict=True)]
            if all(ways):
                (stride, padding), (other_stride, other_padding) = ways  # type: ignore[misc]
                return Convolution(
                    name=name,
                    shape=goes,
                    weight=bias.new_zeros(goes[0], comes[0], kernel, kernel),
                    bias=bias,
                    stride=(stride, other_stride),
                    padding=(padding, other_padding),
                )
    raise ValueError(
        f"{layer_of(node)} lies on one of two branches that are added, and the program that is to "
        f"read the file would compute the sum before it: no synapse leads from {comes} to {goes}; write the dialect "
        "nir or spikingjelly"
    )


def _way(comes: int, goes: int, kernel: int) -> tuple[int, int] | None:
    """Return (stride, padding) by which a convolution makes ``goes`` rows out of ``comes``; None: there are none."""
    found = (
        (stride, padding)
        for padding, stride in product(range(max(goes - comes, 0) + kernel), range(1, comes + 1))
        if comes + 2 * padding >= kernel and (comes + 2 * padding - kernel) // stride + 1 == goes
    )
    return next(found, None)


def _unused(name: str, names: Iterable[str]) -> str:
    taken = set(names)
    return next(one for one in (name, *(f"{name}_{number}" for number in range(len(taken) + 1))) if one not in taken)
