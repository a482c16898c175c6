"""The compiler: a trained net, the target's parameters, and the graph that is written.

With integer weights, the neurons compute a net of integers to the bit:

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

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core.workload import accuracy
from apportion.errors import NotVerified
from apportion.exporting.spiking.calibration.calibrate import EXAMPLES, Calibrated, ScaleSearch, calibrated, percentiles
from apportion.exporting.spiking.calibration.fine_tune import fine_tuned
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.conversion.rate_net import INPUT, FlattenMap, RateNet, computed, summed, with_weight
from apportion.exporting.spiking.dialects.dialect import Dialect
from apportion.exporting.spiking.graph import (
    Convolution,
    CurrentSource,
    Dense,
    Flatten,
    Neurons,
    Node,
    SpikingGraph,
)
from apportion.exporting.spiking.simulator import Simulated, simulate, synapse
from apportion.exporting.target import TrainedNetwork, called

GRID = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of steps that are tried, from the least."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chosen:
    """A graph for its number of steps, and what was found on the way to it."""

    graph: SpikingGraph
    accuracies: tuple[tuple[int, float], ...]
    """(number of steps, accuracy on the examples that chose)."""


def chosen(build: Callable[[int], SpikingGraph], judge: Callable[[SpikingGraph], float], *, at_least: float) -> Chosen:
    """The graph with the least number of steps of ``GRID`` whose accuracy is at least so much. Raises ValueError where
    none is."""
    tried: list[tuple[int, float]] = []
    for steps in GRID:
        graph = build(steps)
        tried.append((steps, judge(graph)))
        if tried[-1][1] >= at_least:
            return Chosen(graph=graph, accuracies=tuple(tried))
    steps, best = max(tried, key=lambda one: one[1])
    raise ValueError(
        f"no number of steps up to {GRID[-1]} is right in {at_least:.2%} of the calibration examples: the best is "
        f"{steps} with {best:.2%}; allow more to be lost (most_lost=), or train for few steps (fine_tune_examples=)"
    )


JUDGING = 512
"""The largest number of calibration examples on which accuracies are taken."""
SAME = 1e-3
"""The largest difference of the outputs, relative to the largest of them, that the net's own float32 may make."""
AT_ONCE = 50
"""The number of examples that are simulated at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SpikingRequest:
    """What the graph is to be."""

    timesteps: int | None
    """None: as few as ``lost`` allows."""
    lost: float
    """The share of the calibration examples that may be lost."""
    fine_tune_examples: int
    """The number of training examples that the net is trained for; 0: none."""
    average_instead_of_max: bool
    levels: int | None
    """The number of levels of a quantised net; None: integrate-and-fire neurons."""
    dialect: Dialect


@dataclass(frozen=True, eq=False, kw_only=True)
class Made:
    """A graph, and what was found on the way."""

    graph: SpikingGraph
    accuracies: tuple[tuple[int, float], ...]
    """(number of steps, accuracy on calibration examples)."""
    own: float | None
    """The accuracy of the net itself on the same; None: the targets are no classes."""
    judged: int
    """The number of those examples."""
    found: tuple[Simulated, ...]
    """What the graph has fired for some of them."""
    training: float = 0.0
    """How long the training has taken, in seconds."""


@dataclass(eq=False, kw_only=True)
class _Compiler:
    """The parts of a compilation that each number of steps needs."""

    request: SpikingRequest
    trained: TrainedNetwork
    net: RateNet
    x: Tensor
    """Calibration examples by which scales are found."""
    judging: Tensor
    targets: Any
    training: float = 0.0
    found: dict[int, tuple[Simulated, ...]] = field(default_factory=dict)

    def build(self, steps: int) -> SpikingGraph:
        """The graph for this number of steps."""
        rule = self.request.dialect
        set_up = partial(calibrated, timesteps=steps, reset=rule.reset, strictly=rule.strictly)
        like = Neurons(name="", shape=(), threshold=torch.ones(()), reset=rule.reset, strictly=rule.strictly)
        start = set_up(self.net, self.x)
        if not self.request.fine_tune_examples:
            return assembled(start.net, start.scales, steps, like=like)
        begun, count = time.perf_counter(), self.request.fine_tune_examples
        assert self.trained.training is not None
        tuned = fine_tuned(
            start,
            steps,
            data=self.trained.training,
            collate=self.trained.collate,
            teacher=self._teacher,
            examples=count,
            like=like,
        )
        self.training += time.perf_counter() - begun
        return assembled(tuned.net, tuned.scales, steps, like=like)

    def _teacher(self, x: Tensor) -> Sequence[Tensor]:
        """What the net itself computes: all activations, where its stages compute the same as it."""
        return [self.trained.module(x)] if self.request.average_instead_of_max else computed(self.net, x)

    def judge(self, graph: SpikingGraph) -> float:
        """The accuracy of a graph."""
        found = tuple(simulate(graph, as_taken(graph, x)) for x in self.judging.split(AT_ONCE))
        self.found[graph.timesteps] = found
        return self.right(torch.cat([one.outputs for one in found]))

    def right(self, outputs: Tensor) -> float:
        """The share of outputs whose largest number is at the target."""
        return float(accuracy(outputs, self.targets))


def as_taken(graph: SpikingGraph, x: Tensor) -> Tensor:
    """The inputs as the graph takes them."""
    return x if graph.units is None else integers(graph, x)


def compiled(trained: TrainedNetwork, request: SpikingRequest) -> Made:
    """Compile a trained net. Raises ValueError, with the layer's name and the cure, where it cannot be."""
    compiler = _compiler(trained, request)
    classes = isinstance(compiler.targets, Tensor) and not compiler.targets.is_floating_point()
    own = compiler.right(_outputs(trained.module, compiler.judging)) if classes else None
    accuracies: tuple[tuple[int, float], ...] = ()
    if request.levels is not None:
        graph = quantized(compiler.net, compiler.x, levels=request.levels)
    elif request.timesteps is not None:
        graph = compiler.build(request.timesteps)
    elif own is None:
        raise ValueError('timesteps="auto" is chosen by accuracy, and the targets are no classes: give a number')
    else:
        made = chosen(compiler.build, compiler.judge, at_least=own - request.lost)
        graph, accuracies = made.graph, made.accuracies
    if not accuracies:
        judge: Callable[[SpikingGraph], float] = compiler.judge
        if own is None:
            compiler.found[graph.timesteps] = (simulate(graph, as_taken(graph, compiler.judging[:AT_ONCE])),)
        else:
            accuracies = ((graph.timesteps, judge(graph)),)
    return Made(
        graph=graph,
        accuracies=accuracies,
        own=own,
        judged=len(compiler.judging),
        found=compiler.found[graph.timesteps],
        training=compiler.training,
    )


def _compiler(trained: TrainedNetwork, request: SpikingRequest) -> _Compiler:
    if request.fine_tune_examples and trained.training is None:
        raise ValueError(
            f"fine_tune_examples={request.fine_tune_examples} needs training examples: give data=Data(training=...)"
        )
    net = lowered(trained.module, trained.sample, average_instead_of_max=request.average_instead_of_max)
    if not request.average_instead_of_max:  # which makes another net
        _hold_to_network(net, trained)
    if trained.calibration is None:
        raise ValueError(
            "thresholds are found by calibration examples, and there are none: give data=Data(calibration=...)"
        )
    x, targets = trained.calibration.inputs, trained.calibration.targets
    apart = len(x) >= 2 * EXAMPLES  # what scales are found by says little about accuracy
    rows = slice(EXAMPLES, EXAMPLES + JUDGING) if apart else slice(0, JUDGING)
    return _Compiler(
        request=request,
        trained=trained,
        net=net.to(torch.float32),
        x=x[:EXAMPLES].float(),
        judging=x[rows].float(),
        targets=targets[rows] if isinstance(targets, Tensor) else targets,
    )


def _hold_to_network(net: RateNet, trained: TrainedNetwork) -> None:
    """Raise NotVerified where the stages, before any of them fires, compute something else than the net: all that comes
    after is held to them."""
    x = trained.sample[:AT_ONCE]
    own = _outputs(trained.module, x).double()
    with torch.no_grad():
        found = computed(net.to(torch.float64), x.double())[-1].reshape(own.shape)
    apart = float((found - own).abs().max() / own.abs().max().clamp(min=1e-12))
    if not apart <= SAME:
        raise NotVerified(
            f"the layers as they were folded compute something else than the net: outputs differ by {apart:.2g} of "
            f"their largest number, of {SAME:g} at most; nothing was written"
        )


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([called(module, part) for part in x.split(AT_ONCE)])


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
