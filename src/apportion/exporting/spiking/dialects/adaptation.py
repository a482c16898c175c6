"""A graph rewritten into an equal one of which a program computes every node right.

Each rewriting changes the nodes and not what the graph computes: grouped convolutions become ones without groups
(neither nir's types nor spikingjelly have any), thresholds of channels go into the weights where a layer must have one
threshold, and a Flatten with the Dense after it becomes a convolution as large as its input where the program would
flatten the examples too.

Graphs that a program computes right which visits nodes depth first.

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
from torch import Tensor

from apportion.exporting.spiking.dialects.dialect import Dialect
from apportion.exporting.spiking.graph import (
    Convolution,
    Dense,
    Flatten,
    Neurons,
    Node,
    Readout,
    SpikingGraph,
    Synapse,
    layer_of,
)

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


def adapted(graph: SpikingGraph, dialect: Dialect) -> SpikingGraph:
    """Return an equal graph, with numbers of float32, that the dialect's program computes right.

    Raises ValueError, with the layer's name and the cure, where there is none.
    """
    dialect.check(graph)
    graph = _without_groups(graph)
    if dialect.one_threshold:
        graph = _with_one_threshold(graph, dialect)
    if dialect.flattens_batch:
        graph = _without_flatten(graph, dialect)
    if dialect.depth_first:
        graph = led_depth_first(graph)
    return graph.to(torch.float32)


def _without_groups(graph: SpikingGraph) -> SpikingGraph:
    grouped = [node for node in graph.nodes if isinstance(node, Convolution) and node.groups > 1]
    return graph.with_nodes(*(replace(node, weight=_ungrouped(node), groups=1) for node in grouped))


def _ungrouped(node: Convolution) -> Tensor:
    """Return the weight with zeros from the channels of other groups."""
    outs, ins, *kernel = node.weight.shape
    weight = node.weight.new_zeros(outs, ins * node.groups, *kernel)
    for group, part in enumerate(node.weight.chunk(node.groups)):
        rows = slice(group * len(part), (group + 1) * len(part))
        weight[rows, group * ins : (group + 1) * ins] = part
    return weight


def _with_one_threshold(graph: SpikingGraph, dialect: Dialect) -> SpikingGraph:
    """Return the graph in which the neurons of a layer with several thresholds have the threshold 1."""
    changed: dict[str, Node] = {}
    for node in graph.neurons:
        if not node.threshold.ndim or bool((node.threshold == node.threshold[0]).all()):
            continue
        for before in graph.into(node.name):
            if not isinstance(before, Dense | Convolution) or len(graph.out_of(before.name)) > 1:
                raise ValueError(
                    f"{layer_of(node)} has a threshold for each channel, and {dialect.name} takes one for the "
                    f"layer; what flows in from {layer_of(before)} cannot be divided by it: put a "
                    "synapse of its own between"
                )
            changed[before.name] = _divided(before, node.threshold)
        changed[node.name] = replace(node, threshold=torch.ones_like(node.threshold[0]))
    return graph.with_nodes(*changed.values())


def _divided(node: Synapse, by: Tensor) -> Synapse:
    return replace(node, weight=node.weight / by.reshape(-1, *[1] * (node.weight.ndim - 1)), bias=node.bias / by)


def _without_flatten(graph: SpikingGraph, dialect: Dialect) -> SpikingGraph:
    """Return the graph in which what follows a Flatten has the shape (channels, 1, 1), and no Flatten."""
    gone: dict[str, Node] = {}
    """Each Flatten and the node that flows into it."""
    nodes: list[Node] = []
    made: dict[str, Node] = {}
    for node in graph.nodes:
        before = [gone.get(one.name, made.get(one.name, one)) for one in graph.into(node.name)]
        if isinstance(node, Flatten):
            if len(before) > 1 or not all(isinstance(one, Dense) for one in graph.out_of(node.name)):
                raise ValueError(
                    f"{layer_of(node)}: {dialect.name} flattens the examples too, and only a fully "
                    "connected layer after one layer can take its place; write the dialect nir, sinabs or spikingjelly"
                )
            gone[node.name] = before[0]
            continue
        made[node.name] = _unflattened(node, before)
        nodes.append(made[node.name])
    edges = tuple(
        (gone[source].name if source in gone else source, to) for source, to in graph.edges if to not in gone
    )  # fmt: skip
    return replace(graph, nodes=tuple(nodes), edges=edges)


def _unflattened(node: Node, before: list[Node]) -> Node:
    if len(node.shape) != 1 or not before or len(before[0].shape) == 1:
        return node
    shape = (*node.shape, 1, 1)
    if isinstance(node, Dense):
        weight = node.weight.reshape(len(node.weight), *before[0].shape)
        if weight.shape[-1] != weight.shape[-2]:
            raise ValueError(
                f"{layer_of(node)} takes {before[0].shape} as a convolution of that size, and a NIR kernel is "
                "square: write the dialect nir, sinabs or spikingjelly"
            )
        return Convolution(name=node.name, shape=shape, weight=weight, bias=node.bias, layer=node.layer)
    assert isinstance(node, Neurons | Readout)
    return replace(node, shape=shape)
