"""A net of integers, and neurons that compute it to the bit.

::

    q = clip(floor((sum of w q' + b + theta // 2) / theta), 0, L)        all of them integers

The weights are rounded to 8 bits in units of each output channel, the activations to L levels, and a fixed path, such
as a residual one, to the integer nearest to its ratio of units. A ``signed`` neuron with the threshold theta and L
levels ends at exactly this q: after the last spike its membrane is what has come in less theta times its count, and it
is quiet only where that lies in [0, theta), or below with a count of 0, or above with a count of L. So both are equal
for every input as soon as nothing fires any more. No layer needs more than L steps after those before it are quiet,
which bounds the number of steps: L times the length of the longest way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apportion.exporting.spiking.calibration.calibrate import EXAMPLES, Calibrated, ScaleSearch, percentiles
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.linear_maps import FlattenMap, with_weight
from apportion.exporting.spiking.conversion.rate_net import INPUT, RateNet, computed, summed
from apportion.exporting.spiking.graph import (
    Convolution,
    CurrentSource,
    Dense,
    Flatten,
    Neurons,
    Node,
    SpikingGraph,
)
from apportion.exporting.spiking.simulator import synapse


@torch.no_grad()
def rounded(net: RateNet, x: Tensor, *, levels: int) -> Calibrated:
    """Find for each channel the scale, the activation of the highest level, whose rounded activations are nearest to
    those of the net, and correct the biases; ``x``: calibration examples."""
    x = x[:EXAMPLES]
    wanted, starts = computed(net, x), percentiles(net, x)
    found: list[Tensor] = []
    scales: list[Tensor] = []
    stages = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else found[source])
        if number == len(net.stages) - 1:
            stages.append(replace(stage, bias=stage.bias + (wanted[number] - z).mean(0)))
            break
        layer = _RoundedLayer(wanted=wanted[number], z=z, levels=levels)
        scale, correction = layer.best(starts[number])
        found.append(layer.rates(scale, correction))
        stages.append(replace(stage, bias=stage.bias + correction))
        scales.append(scale)
    return Calibrated(net=replace(net, stages=tuple(stages)), scales=tuple(scales))


@dataclass(eq=False, kw_only=True)
class _RoundedLayer(ScaleSearch):
    """A layer whose activations are rounded."""

    z: Tensor
    levels: int

    def rates(self, scale: Tensor, correction: Tensor) -> Tensor:
        """The rounded activations."""
        shape = (-1, *[1] * (self.z.ndim - 2))
        step = (scale / self.levels).reshape(shape)
        # The same rounding, half up and limited, as that of the neurons, so that the search optimizes what will be
        # computed.
        return ((self.z + correction.reshape(shape)) / step + 0.5).floor_().clamp_(0, self.levels).mul_(step)


WEIGHT_LIMIT = 127
"""The largest weight of a trained path."""
INPUT_LIMIT = 127
"""The largest magnitude of an input."""


def integers(graph: SpikingGraph, x: Tensor) -> Tensor:
    """The inputs x as the integers that a quantised graph takes, in float64."""
    assert graph.units is not None
    return (x.double() / graph.units[0]).round().clamp(-INPUT_LIMIT, INPUT_LIMIT)


def quantized(net: RateNet, x: Tensor, *, levels: int) -> SpikingGraph:
    """Quantise a float32 net by calibration examples: a graph of ``signed`` neurons whose weights, biases and
    thresholds are integers, which takes ``integers`` and has ``units``. Raises ValueError where two linear layers
    follow each other, whose sum cannot be rounded to integers of 8 bits."""
    found = rounded(net, x, levels=levels)
    scales = [scale.double() / levels for scale in found.scales]
    net = found.net.to(torch.float64)
    for stage in net.stages:
        for term in stage.terms:
            if sum(not isinstance(one, FlattenMap) for one in term.maps) > 1:
                raise ValueError(
                    f"layer {stage.name} follows a linear layer without an activation between them, which integers "
                    'cannot round once: put a ReLU between them, or use neuron="integrate_and_fire"'
                )
    input_step = float(x.abs().max()) / INPUT_LIMIT or 1.0
    signed = Neurons(name="", shape=(), threshold=torch.ones(()), reset="signed", levels=levels)
    graph = assembled(_with_inputs_in(net, input_step), scales, 1, like=signed)
    units = {name: _units(graph, name) for name in [*(n.name for n in graph.neurons), graph.readout.name]}
    nodes = [_integer(graph, node, units) for node in graph.nodes]
    made = replace(
        graph.with_nodes(*nodes, timesteps=levels * _longest_way(graph)),
        current="first_step",
        units=(input_step, float(units[graph.readout.name][0])),
    )
    # Every sum and membrane is an integer below 2**23: float32 has a mantissa of 24 bits and is exact in any order of
    # addition. Otherwise float64 is, up to 2**53.
    return made.to(torch.float32 if _largest(made) < 2**23 else torch.float64)


def quantized_outputs(graph: SpikingGraph, x: Tensor) -> Tensor:
    """What the integers of a graph compute for integers (float64), layer by layer: int64. Sums below 2^53 are exact."""
    values: dict[str, Tensor] = {}
    graph = graph.to(torch.float64)
    for node in graph.nodes:
        if isinstance(node, CurrentSource):
            values[node.name] = x
            continue
        total = torch.stack([values[other.name] for other in graph.into(node.name)]).sum(0)
        if isinstance(node, Dense | Convolution):
            total = synapse(node, total)
        elif isinstance(node, Flatten):
            total = total.flatten(1)
        elif isinstance(node, Neurons):
            threshold = node.threshold.reshape(-1, *[1] * (len(node.shape) - 1))
            # In int64 and by floor, since the quotient of two float64 could be rounded up to the next integer just
            # below a multiple of the threshold.
            whole = torch.div(total.long(), threshold.long(), rounding_mode="floor")
            total = whole.clamp(0, node.levels).double()
        values[node.name] = total
    return values[graph.readout.name].long()


def _with_inputs_in(net: RateNet, step: float) -> RateNet:
    """The net for inputs that are counted in steps."""
    stages = []
    for stage in net.stages:
        terms = []
        for term in stage.terms:
            maps = term.maps
            if term.source == INPUT and maps:
                at = next(n for n, one in enumerate(maps) if not isinstance(one, FlattenMap))
                maps = (*maps[:at], with_weight(maps[at], lambda weight: weight * step), *maps[at + 1 :])
            terms.append(replace(term, maps=maps))
        stages.append(replace(stage, terms=tuple(terms)))
    return replace(net, stages=tuple(stages))


def _synapses(graph: SpikingGraph, name: str) -> list[Dense | Convolution]:
    return [node for node in graph.into(name) if isinstance(node, Dense | Convolution)]


def _units(graph: SpikingGraph, name: str) -> Tensor:
    """The unit that each channel's sum is counted in: its largest trained weight is ``WEIGHT_LIMIT`` of them; one for
    all channels of the readout, whose integers are compared with each other."""
    paths = [node.weight.abs().flatten(1) for node in _synapses(graph, name)]
    sums = [weight for weight in paths if (weight[0] != 0).sum() > 1] or paths  # the others only scale
    widest = torch.stack([weight.amax(1) for weight in sums]).amax(0)
    widest = widest.clamp(min=float(widest.max()) * 1e-3 or 1.0)
    return (widest if name != graph.readout.name else widest.max().expand_as(widest)) / WEIGHT_LIMIT


def _integer(graph: SpikingGraph, node: Node, units: dict[str, Tensor]) -> Node:
    """The node with integers."""
    if isinstance(node, Neurons):
        threshold = (1 / units[node.name]).round().clamp(min=1)
        return replace(node, threshold=threshold)
    if not isinstance(node, Dense | Convolution):
        return node
    (to,) = graph.out_of(node.name)
    unit = units[to.name]
    bias = (node.bias / unit).round()
    if isinstance(to, Neurons) and graph.into(to.name)[0] is node:
        # Half a threshold rounds the level to the nearest instead of cutting it off. It is added on one of the paths
        # only: the others flow into the same sum.
        bias = bias + torch.floor((1 / unit).round().clamp(min=1) / 2)
    return replace(node, weight=(node.weight / unit.reshape(-1, *[1] * (node.weight.ndim - 1))).round(), bias=bias)


def _longest_way(graph: SpikingGraph) -> int:
    """The largest number of layers of neurons on a way through the graph."""
    longest: dict[str, int] = {}
    for node in graph.nodes:
        before = max((longest[other.name] for other in graph.into(node.name)), default=0)
        longest[node.name] = before + isinstance(node, Neurons)
    return longest[graph.readout.name]


def _largest_input(graph: SpikingGraph, node: Node) -> int:
    """The largest magnitude of what comes out of neurons or the source, or of a flattening of them."""
    if isinstance(node, Flatten):
        return max(_largest_input(graph, before) for before in graph.into(node.name))
    return (node.levels or 0) if isinstance(node, Neurons) else INPUT_LIMIT


def _largest(graph: SpikingGraph) -> float:
    """A bound of every sum and every membrane.

    What has flowed into a neuron up to any step is a sum of weights times counts from 0 to L, at most ``total`` in
    magnitude. A neuron fires where its membrane stays at 0 or above, and takes a spike back where it stays below the
    threshold, so that the membrane leaves this range only by what flows in afterwards, a difference of two such sums.
    """
    most: Sequence[float] = [0.0]
    ends: tuple[Node, ...] = (*graph.neurons, graph.readout)
    for node in ends:
        total = 0.0
        for each in _synapses(graph, node.name):
            came = max(_largest_input(graph, before) for before in graph.into(each.name))
            total += float((each.weight.abs().flatten(1).sum(1) * came + each.bias.abs()).max())
        if isinstance(node, Neurons):
            total = 2 * total + float(node.threshold.max())
        most = [*most, total]
    return max(most)
