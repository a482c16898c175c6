"""A network of integrate-and-fire neurons as a graph, between the compiler, the simulator and the file.

::

    CurrentSource --> Convolution --> Neurons --> Convolution --> Neurons --> Dense --> Readout
                                  \\                        ^
                                   `---> Convolution ------'          two edges into one node: their currents add up

Time is counted in steps. In each step every node is computed once, in the order of ``nodes``: what a neuron fires in a
step reaches the readout in that step. Spikes are 0 or 1 (or more, by the reset rule), the weights carry the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Reset = Literal["subtract", "zero", "subtract_clipped_multi", "signed"]
"""What a neuron does when its membrane v, after the currents of the step were added, has reached the threshold:

- ``subtract``: fires once; the threshold is subtracted from v.
- ``zero``: fires once; v becomes 0.
- ``subtract_clipped_multi``: v is first raised to minus the threshold where it is lower; then the neuron fires
  floor(v / threshold) times, if that is above 0, and as many thresholds are subtracted.
- ``signed``: remembers how often it has fired, less how often it has taken a spike back. It fires +1 where v has
  reached the threshold and the count is below ``Neurons.levels``, and -1 where v is below 0 and the count is above 0;
  the threshold is subtracted or added (SpikeZIP-TF, ICML 2024).
"""
Current = Literal["constant", "first_step"]
"""When the inputs and the biases flow: in each step the same, or in the first step alone (for ``signed`` neurons)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CurrentSource:
    """The input: the numbers of an example, given as a current and not as spikes."""

    name: str
    shape: tuple[int, ...]
    """The shape of an example, without the batch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Dense:
    """A fully connected synapse: x @ weight.T + bias."""

    name: str
    shape: tuple[int, ...]
    """The shape (outputs,) of what comes out."""
    weight: Tensor
    """(outputs, inputs)."""
    bias: Tensor
    """(outputs,): what flows each step, zeros where there is none."""
    layer: str = ""
    """The layers of the network that it comes from, with their types: "layer 0 (Conv2d)"."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Convolution:
    """A convolutional synapse, as ``torch.nn.functional.conv2d`` computes it."""

    name: str
    shape: tuple[int, ...]
    """(channels, height, width) of what comes out."""
    weight: Tensor
    """(channels out, channels in / groups, height, width)."""
    bias: Tensor
    """(channels out,): what flows each step, zeros where there is none."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    """Rows and columns of zeros on each side."""
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    layer: str = ""
    """The layers of the network that it comes from, as those of ``Dense``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Flatten:
    """All dimensions of an example in one, the last of them varying fastest."""

    name: str
    shape: tuple[int, ...]
    layer: str = ""
    """The layers of the network that it comes from, as those of ``Dense``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Neurons:
    """Integrate-and-fire neurons without a leak, whose membranes begin at 0.

    A start at half a threshold, which the conversion wants, lies in the biases before them as threshold / (2 T) a step.
    """

    name: str
    shape: tuple[int, ...]
    threshold: Tensor
    """One number, shape (), or one for each channel, shape (channels,): dimension 0 of ``shape``."""
    reset: Reset = "subtract"
    strictly: bool = False
    """Whether a neuron fires only above the threshold, and not at it (norse and snntorch do so)."""
    levels: int | None = None
    """The largest count of a ``signed`` neuron."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Readout:
    """The output: the currents that come in, added up over the steps and divided by their number."""

    name: str
    shape: tuple[int, ...]


Node = CurrentSource | Dense | Convolution | Flatten | Neurons | Readout
Synapse = Dense | Convolution


def layer_of(node: Node) -> str:
    """Return the layers of the network that a node comes from, as a refusal names them."""
    made_from = getattr(node, "layer", "")
    return made_from or f"layer {node.name} ({type(node).__name__})"


@dataclass(frozen=True, eq=False, kw_only=True)
class SpikingGraph:
    """Nodes in topological order and the edges between them. Several edges into one node add up.

    One node is a CurrentSource, the first; one a Readout, the last. Raises ValueError where that does not hold, where a
    node comes before one that it depends on, or where shapes of edges into one node differ.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]
    """(from, to), by the nodes' names."""
    timesteps: int
    """The number of steps that an example is run for, T: the biases are made for it."""
    current: Current = "constant"
    units: tuple[float, float] | None = None
    """What the integers of a quantised net count in: an input x goes in as the integer nearest to x / units[0], and the
    output is units[1] times what comes out; None: inputs and outputs are as they are."""

    def __post_init__(self) -> None:
        place = {node.name: number for number, node in enumerate(self.nodes)}
        if len(place) != len(self.nodes):
            raise ValueError("two nodes of a spiking graph have the same name: give each its own")
        kinds = [type(node) for node in self.nodes]
        ends = kinds[0] is CurrentSource and kinds[-1] is Readout
        if not ends or kinds.count(CurrentSource) != 1 or kinds.count(Readout) != 1:
            raise ValueError("a spiking graph has one source, its first node, and one readout, its last")
        for source, to in self.edges:
            if place[source] >= place[to]:
                raise ValueError(f"the edge {source} -> {to} goes back: spiking graphs are without cycles")
        for node in self.nodes[1:]:
            shapes = {other.shape for other in self.into(node.name)}
            if len(shapes) != 1:
                raise ValueError(f"what flows into {node.name} has the shapes {sorted(shapes)}: it must be one")
        if self.timesteps < 1:
            raise ValueError(f"timesteps={self.timesteps} must be at least 1")

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @property
    def source(self) -> CurrentSource:
        """The node that the inputs flow in at."""
        assert isinstance(self.nodes[0], CurrentSource)
        return self.nodes[0]

    @property
    def readout(self) -> Readout:
        """The node that the outputs are read at."""
        assert isinstance(self.nodes[-1], Readout)
        return self.nodes[-1]

    @property
    def neurons(self) -> tuple[Neurons, ...]:
        """The layers that fire, in the order of the nodes."""
        return tuple(node for node in self.nodes if isinstance(node, Neurons))

    def into(self, name: str) -> tuple[Node, ...]:
        """The nodes with an edge into this one, in the order of the edges."""
        return tuple(self.by_name[source] for source, to in self.edges if to == name)

    def out_of(self, name: str) -> tuple[Node, ...]:
        """The nodes that this one has an edge to, in the order of the edges."""
        return tuple(self.by_name[to] for source, to in self.edges if source == name)

    def with_nodes(self, *changed: Node, timesteps: int | None = None) -> SpikingGraph:
        """The same graph with these in the places of the nodes of their names."""
        new = {node.name: node for node in changed}
        return replace(
            self,
            nodes=tuple(new.get(node.name, node) for node in self.nodes),
            timesteps=self.timesteps if timesteps is None else timesteps,
        )

    def to(self, dtype: torch.dtype) -> SpikingGraph:
        """The same graph with its tensors in this floating type."""
        return self.with_nodes(*(_cast(node, dtype) for node in self.nodes))

    def with_reset(self, reset: Reset, *, strictly: bool = False) -> SpikingGraph:
        """The same graph with neurons of another rule, as another reader of its file would run it."""
        return self.with_nodes(*(replace(node, reset=reset, strictly=strictly) for node in self.neurons))


def _cast(node: Node, dtype: torch.dtype) -> Node:
    if isinstance(node, Dense | Convolution):
        return replace(node, weight=node.weight.to(dtype), bias=node.bias.to(dtype))
    return replace(node, threshold=node.threshold.to(dtype)) if isinstance(node, Neurons) else node
