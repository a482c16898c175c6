"""The dialects of NIR: by which rules each program runs the neurons of a file, and which nodes it gets right.

NIR (Pedersen et al., Nature Communications 2024) defines a neuron in continuous time, where the membrane is at the
threshold when it fires, and to subtract the threshold is to reset to zero. In steps of time these differ, and each
program has chosen without saying so in the file. What is said here was found by running files with nir 1.0.8, nirtorch
2.6, sinabs 3.1.3, spikingjelly 2.0.0, norse 1.1.0 and snntorch 1.0.0.

| | sinabs | spikingjelly | norse |
|---|---|---|---|
| fires | as often as the threshold fits | once | once |
| at the threshold itself | yes | yes | no |
| then | subtracts, and clips at minus the threshold | v = v_reset | v = 0, whatever v_reset says |
| r | ignored | must be 1 / dt | ignored |
| two edges into a node | added, but a node is computed when the first branch comes to it | added | as sinabs |
| Linear, AvgPool2d | left out without a word | right | AvgPool2d left out, Linear right |
| Flatten | right | right | flattens the batch too |
| numbers | float32; spikes in float32 whatever the model is cast to | float64 | read in float32 |

The dialect ``exact`` is apportion's own: neurons that take spikes back, for which NIR has no node.

snntorch makes an IF node a leaky neuron of beta=0.9, which is another network, and has no dialect here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apportion.exporting.spiking.graph import Neurons, Reset, SpikingGraph, layer_of


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one program reads NIR files."""

    name: str
    reset: Reset
    """The rule by which it runs an IF node."""
    program: str = "apportion"
    """The program, and the version of it by which the rules were found."""
    strictly: bool = False
    """Whether a neuron fires only above the threshold, and not at it."""
    wrong: Mapping[str, str] = field(default_factory=dict)
    """The types of nodes that it reads but does not compute, and what it does instead."""
    depth_first: bool = False
    """Whether it computes the nodes in the order in which a walk meets them that goes on from each node at once."""
    one_threshold: bool = False
    """Whether all neurons of a layer must have the same threshold."""
    flattens_batch: bool = False
    """Whether a Flatten node flattens the examples too."""

    @property
    def rule(self) -> str:
        """What a neuron does, for error messages."""
        fires = "fires above the threshold" if self.strictly else "fires at the threshold"
        return f"{fires} and resets by {self.reset!r}"

    def speaks(self, graph: SpikingGraph) -> SpikingGraph:
        """Return the graph with its neurons run by this dialect's rule."""
        return graph.with_reset(self.reset, strictly=self.strictly)

    def check(self, graph: SpikingGraph) -> None:
        """Raise ValueError, with the layer's name, where a neuron of the graph follows another rule."""
        if graph.current != "constant" and self.reset != "signed":
            raise ValueError(
                f"current={graph.current!r}: a NIR file has biases that flow in every step; convert the network with "
                "a constant current"
            )
        for node in graph.neurons:
            self._check_neurons(node)

    def _check_neurons(self, node: Neurons) -> None:
        if node.reset == "signed" != self.reset:
            raise ValueError(
                f"{layer_of(node)} takes spikes back, which no NIR node can express: convert the network with "
                "neurons of one sign"
            )
        if (node.reset, node.strictly) != (self.reset, self.strictly):
            raise ValueError(
                f"{layer_of(node)} resets by {node.reset!r}{' above' if node.strictly else ' at'} the threshold, "
                f"and in the dialect {self.name} a neuron {self.rule}: convert the network for this dialect"
            )


_SKIPPED = "leaves it out without a word"

DIALECTS: Mapping[str, Dialect] = {
    one.name: one
    for one in (
        Dialect(name="nir", program="NIR 1.0.8", reset="subtract", strictly=True),
        Dialect(name="exact", program="apportion", reset="signed"),
        Dialect(
            name="sinabs",
            program="sinabs 3.1.3",
            reset="subtract_clipped_multi",
            wrong={"Linear": _SKIPPED, "AvgPool2d": _SKIPPED},
            depth_first=True,
        ),
        Dialect(name="spikingjelly", program="spikingjelly 2.0.0", reset="zero", one_threshold=True),
        Dialect(
            name="norse",
            program="norse 1.1.0",
            reset="zero",
            strictly=True,
            wrong={"AvgPool2d": _SKIPPED, "Flatten": "flattens the examples too"},
            depth_first=True,
            flattens_batch=True,
        ),
    )
}


def dialect(name: str) -> Dialect:
    """Return the dialect of this name. Raises ValueError where there is none."""
    if name in DIALECTS:
        return DIALECTS[name]
    known = ", ".join(one for one in DIALECTS if one != "exact")  # which has a parameter of its own
    if name == "snntorch":
        raise ValueError(
            "dialect='snntorch' cannot be written: snntorch reads an IF node as a leaky neuron of beta=0.9, which is "
            f"another network; write one of {known}"
        )
    raise ValueError(f"dialect={name!r} is unknown: write one of {known}")
