"""The reference simulator: a spiking graph, step by step, for many examples at once.

The inputs are a constant current, the same in every step, or flow in the first step alone (``SpikingGraph.current``).
What depends on nothing but the inputs is computed once, and the readout from the counts of spikes, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

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


@dataclass(eq=False, kw_only=True)
class Membranes:
    """The state of a layer of neurons."""

    neurons: Neurons
    v: Tensor
    threshold: Tensor
    spikes: Tensor
    count: Tensor
    unit: bool
    """Whether every threshold is 1."""
    fired: Tensor | None = None
    """Spikes of either sign, where there are two."""

    @classmethod
    def at_rest(cls, neurons: Neurons, like: Tensor) -> Membranes:
        """The state before the first step; ``like``: a tensor of the currents' shape, type and layout."""
        threshold = neurons.threshold.to(like.dtype)
        threshold = threshold.reshape(-1, *[1] * (like.ndim - 2)) if threshold.ndim else threshold
        return cls(
            neurons=neurons,
            v=torch.zeros_like(like),
            threshold=threshold,
            spikes=torch.zeros_like(like),
            count=torch.zeros_like(like),
            unit=bool((threshold == 1).all()),
            fired=torch.zeros_like(like) if neurons.reset == "signed" else None,
        )

    def step(self, current: Tensor | None) -> Tensor:
        """Add the currents (None: there are none), fire, and return the spikes, which the next step overwrites."""
        if current is not None:
            self.v += current
        {"subtract": self._subtract, "zero": self._zero, "signed": self._signed}.get(
            self.neurons.reset, self._clipped_multi
        )()
        return self.spikes

    def _reached(self) -> None:
        compare = torch.gt if self.neurons.strictly else torch.ge
        compare(self.v, self.threshold, out=self.spikes)

    def _take(self, spikes: Tensor) -> None:
        if self.unit:
            self.v -= spikes
        else:
            self.v.addcmul_(spikes, self.threshold, value=-1)

    def _subtract(self) -> None:
        self._reached()
        self._take(self.spikes)
        self.count += self.spikes

    def _zero(self) -> None:
        self._reached()
        self.v.masked_fill_(self.spikes != 0, 0)
        self.count += self.spikes

    def _clipped_multi(self) -> None:
        # Clipped before it fires, since sinabs applies its lower limit to the membrane that it then divides.
        torch.maximum(self.v, -self.threshold, out=self.v)
        torch.div(self.v, self.threshold, rounding_mode="trunc", out=self.spikes)  # as sinabs rounds
        self.spikes.clamp_(min=0)
        self._take(self.spikes)
        self.count += self.spikes

    def _signed(self) -> None:
        assert self.neurons.levels is not None
        assert self.fired is not None
        torch.ge(self.v, self.threshold, out=self.spikes)
        # Comparisons are by state and not by spikes of this step: a neuron at its highest level stays quiet, and one at
        # 0 has no spike to take back. Both keep the count in 0 ... levels.
        self.spikes *= self.count < self.neurons.levels
        self.spikes -= ((self.v < 0) & (self.count > 0)).to(self.v.dtype)
        self._take(self.spikes)
        self.count += self.spikes
        self.fired += self.spikes.abs()


def fired(neurons: Neurons, currents: Iterable[Tensor], each: Tensor) -> Iterator[Tensor]:
    """The spikes of each step, which the next step overwrites; ``each``: what flows in every step besides."""
    state: Membranes | None = None
    for current in currents:
        if state is None:
            state = Membranes.at_rest(neurons, current)
        state.v += each
        yield state.step(current)


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulated:
    """What a graph has computed for a batch of examples."""

    outputs: Tensor
    """(examples, ...): the currents into the readout, summed over the steps and divided by their number; for a current
    of the first step alone the sum itself."""
    counts: Mapping[str, Tensor]
    """For each layer of neurons how often each has fired in all steps: (examples, *shape). A spike that is taken back
    counts as -1."""
    spikes: Mapping[str, Tensor]
    """For each layer of neurons the number of its spikes, of either sign, for each example: (examples,)."""
    operations: Mapping[str, Tensor]
    """For each layer of neurons the number of synaptic operations that its spikes cause, for each example: each spike
    is added once for each neuron that it reaches by a weight other than zero: (examples,)."""
    steps: int
    """The number of steps that were run: the graph's, or fewer where nothing fired any more."""


@dataclass(eq=False)
class _Run:
    """A simulation of a batch."""

    graph: SpikingGraph
    x: Tensor
    constant: dict[str, Tensor | None] = field(default_factory=dict)
    """What the nodes that depend on the inputs alone give in each step."""
    membranes: dict[str, Membranes] = field(default_factory=dict)
    at_the_end: set[str] = field(default_factory=set)
    """The nodes between the last neurons and the readout, which are computed from counts."""

    def value(self, node: Node, values: Mapping[str, Tensor | None], *, biased: bool) -> Tensor | None:
        """What a synapse gives for what comes into it; None stands for zeros."""
        total: Tensor | None = None
        for other in self.graph.into(node.name):
            came = values[other.name]
            if came is not None:
                total = came if total is None else total + came
        if isinstance(node, Dense | Convolution):
            if total is None:
                return None if not biased else self._bias(node)
            return synapse(node, total, biased=biased)
        return total.flatten(1) if isinstance(node, Flatten) and total is not None else total

    def _bias(self, node: Dense | Convolution) -> Tensor:
        return node.bias.reshape(-1, *[1] * (len(node.shape) - 1)).expand(len(self.x), *node.shape)


def synapse(node: Dense | Convolution, x: Tensor, *, biased: bool = True) -> Tensor:
    """The currents that a synapse gives."""
    bias = node.bias if biased else None
    if isinstance(node, Dense):
        return functional.linear(x, node.weight, bias)
    single = node.groups == len(node.weight) == x.shape[1] and node.weight[0].numel() == 1
    if single and node.stride == (1, 1) and node.padding == (0, 0):  # the convolution would take longer
        product = x * node.weight.reshape(-1, 1, 1)
        return product if bias is None or not bias.any() else product + bias.reshape(-1, 1, 1)
    return functional.conv2d(x, node.weight, bias, node.stride, node.padding, node.dilation, node.groups)


@torch.no_grad()
def simulate(graph: SpikingGraph, x: Tensor) -> Simulated:
    """Run the graph for a batch of examples (examples, *shape), in the type of its weights: in float64 the sums are
    exact enough to tell every spike; float32 takes half the time."""
    dtype = next((node.weight.dtype for node in graph.nodes if isinstance(node, Dense | Convolution)), x.dtype)
    x = x.to(dtype)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    run = _Run(graph, x)
    fed = _fed(graph)
    run.at_the_end = _after_the_last_neurons(graph)
    for node in graph.nodes:
        if node.name not in fed:
            run.constant[node.name] = (
                x if isinstance(node, CurrentSource) else run.value(node, run.constant, biased=True)
            )
    steps = graph.timesteps
    for t in range(graph.timesteps):
        # With the input in the first step alone, a step without a spike changes no membrane: all later ones would be
        # quiet as well.
        if not _one_step(run, fed, first=t == 0) and graph.current == "first_step" and t > 0:
            steps = t + 1
            break
    return _result(run, fed, steps)


def _one_step(run: _Run, fed: set[str], *, first: bool) -> bool:
    """Run all nodes for one step and return whether any neuron has fired."""
    once = run.graph.current == "first_step"
    flows = first or not once
    values: dict[str, Tensor | None] = {name: value if flows else None for name, value in run.constant.items()}
    any_fired = False
    for node in run.graph.nodes:
        if node.name not in fed or node.name in run.at_the_end:
            continue
        value = run.value(node, values, biased=flows)
        if isinstance(node, Neurons):
            if node.name not in run.membranes:
                like = value if value is not None else run.x.new_zeros(len(run.x), *node.shape)
                run.membranes[node.name] = Membranes.at_rest(node, like)
            value = run.membranes[node.name].step(value)
            if once:
                fires = bool(value.any())
                any_fired |= fires
                value = value if fires else None
        values[node.name] = value
    return any_fired


def _result(run: _Run, fed: set[str], steps: int) -> Simulated:
    graph = run.graph
    per_step = 1 if graph.current == "first_step" else graph.timesteps
    values: dict[str, Tensor | None] = dict(run.constant)
    for node in graph.nodes:
        if isinstance(node, Neurons):
            values[node.name] = run.membranes[node.name].count / per_step
        elif node.name in run.at_the_end and node.name in fed:
            values[node.name] = run.value(node, values, biased=True)
    outputs = values[graph.readout.name]
    assert outputs is not None
    counts = {name: state.count for name, state in run.membranes.items()}
    fired = {name: state.count if state.fired is None else state.fired for name, state in run.membranes.items()}
    reached = {name: fan_out(graph, name).to(outputs.dtype) for name in fired}
    return Simulated(
        outputs=outputs,
        counts=counts,
        spikes={name: x.flatten(1).sum(1) for name, x in fired.items()},
        operations={name: (x * reached[name]).flatten(1).sum(1) for name, x in fired.items()},
        steps=steps,
    )


def _fed(graph: SpikingGraph) -> set[str]:
    """The nodes that depend on spikes, and the neurons."""
    found: set[str] = set()
    for node in graph.nodes:
        if isinstance(node, Neurons) or any(other.name in found for other in graph.into(node.name)):
            found.add(node.name)
    return found


def _after_the_last_neurons(graph: SpikingGraph) -> set[str]:
    """The nodes from which no way leads to neurons."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        out = graph.out_of(node.name)
        if not isinstance(node, Neurons) and (isinstance(node, Readout) or all(o.name in found for o in out)):
            found.add(node.name)
    return found


def fan_out(graph: SpikingGraph, name: str) -> Tensor:
    """The number of weights other than zero that a spike of each neuron of a layer meets, in its shape."""
    node = graph.by_name[name]
    total = torch.zeros(node.shape)
    for to in graph.out_of(name):
        x = torch.zeros(1, *node.shape, requires_grad=True)
        inner = to
        with torch.enable_grad():
            value: Tensor = x
            while isinstance(inner, Flatten):
                value = value.flatten(1)
                (inner,) = graph.out_of(inner.name)
            if not isinstance(inner, Dense | Convolution):
                continue  # a direct edge: the spike itself is the current
            ones = _ones(inner)
            (reached,) = torch.autograd.grad(synapse(ones, value).sum(), x)
        total = total + reached[0]
    return total


def _ones(node: Dense | Convolution) -> Dense | Convolution:
    return replace(node, weight=(node.weight != 0).float(), bias=torch.zeros(len(node.weight)))
