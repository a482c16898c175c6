"""Conversion of stages and their scales to the graph of neurons with a threshold of 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from apportion.exporting.spiking.conversion.rate_net import (
    INPUT,
    ConvolutionMap,
    FlattenMap,
    LinearMap,
    Maps,
    RateNet,
    Stage,
    scaled,
    scaled_inputs,
)
from apportion.exporting.spiking.graph import (
    Convolution,
    CurrentSource,
    Dense,
    Flatten,
    Neurons,
    Node,
    Readout,
    SpikingGraph,
)

SOURCE = "input"
READOUT = "output"


def assembled(net: RateNet, scales: Sequence[Tensor], timesteps: int, *, like: Neurons | None = None) -> SpikingGraph:
    """The graph of a net; ``scales``: for each stage but the last the activation of each channel at which its neurons
    fire in every step; ``like``: neurons whose rule all are to have, None: they subtract.

    The weights are scaled so that the threshold is 1: each neuron's current is z / scale, and half a threshold over all
    steps, 1 / (2 T) a step, rounds the count of spikes instead of cutting it off. ``signed`` neurons are without it.
    """
    half = like is None or like.reset != "signed"
    source = CurrentSource(name=SOURCE, shape=net.shape)
    nodes: list[Node] = [source]
    edges: list[tuple[str, str]] = []
    ends = [stage.name for stage in net.stages]
    for number, stage in enumerate(net.stages):
        last = number == len(net.stages) - 1
        ends[number] = READOUT if last else stage.name
        own = torch.ones_like(stage.bias) if last else scales[number]
        bias = stage.bias / own + (1 / (2 * timesteps) if half and not last else 0.0)
        for place, maps in enumerate(_scaled_paths(net, stage, scales, own)):
            before = SOURCE if stage.terms[place].source == INPUT else ends[stage.terms[place].source]
            name = stage.name if last and not place else f"{stage.name}_synapse{f'_{place + 1}' if place else ''}"
            path = [
                _node(one, f"{name}{f'_{at}' if at < len(maps) else ''}", stage.layers)
                for at, one in enumerate(maps, start=1)
            ]
            if not place:
                end = path[-1]
                assert isinstance(end, Dense | Convolution)
                path[-1] = replace(end, bias=bias)
            for node in path:
                nodes.append(node)
                edges.append((before, node.name))
                before = node.name
            edges.append((before, ends[number]))
        if last:
            nodes.append(Readout(name=READOUT, shape=stage.shape))
        else:
            one = torch.ones((), dtype=bias.dtype)
            made = Neurons(name=stage.name, shape=stage.shape, threshold=one)
            if like is not None:
                made = replace(made, reset=like.reset, strictly=like.strictly, levels=like.levels)
            nodes.append(made)
    return SpikingGraph(nodes=tuple(nodes), edges=tuple(edges), timesteps=timesteps)


def _scaled_paths(net: RateNet, stage: Stage, scales: Sequence[Tensor], own: Tensor) -> list[Maps]:
    """The maps from spikes to currents in units of the threshold, with weights in the first and the last of them."""
    found = []
    for term in stage.terms:
        maps = term.maps
        if term.source != INPUT:
            maps = scaled_inputs(maps, scales[term.source], net.stages[term.source].shape)
        found.append(scaled(maps, 1 / own, stage.shape))
    return found


def _node(one: LinearMap, name: str, layer: str) -> Node:
    """A synapse without a bias, or a flattening."""
    if isinstance(one, FlattenMap):
        return Flatten(name=name, shape=one.outs, layer=layer)
    bias = one.weight.new_zeros(len(one.weight))
    if not isinstance(one, ConvolutionMap):
        return Dense(name=name, shape=one.outs, weight=one.weight, bias=bias, layer=layer)
    return Convolution(
        name=name, shape=one.outs, weight=one.weight, bias=bias, stride=one.stride, padding=one.padding,
        dilation=one.dilation, groups=one.groups, layer=layer,
    )  # fmt: skip
