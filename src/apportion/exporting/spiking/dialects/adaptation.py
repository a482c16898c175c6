"""A graph rewritten into an equal one of which a program computes every node right.

Each rewriting changes the nodes and not what the graph computes: grouped convolutions become ones without groups
(neither nir's types nor spikingjelly have any), thresholds of channels go into the weights where a layer must have one
threshold, and a Flatten with the Dense after it becomes a convolution as large as its input where the program would
flatten the examples too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from apportion.exporting.spiking.dialects.dialect import Dialect
from apportion.exporting.spiking.dialects.execution_order import led_depth_first
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
