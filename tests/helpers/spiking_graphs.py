"""Small spiking graphs, made by hand, that files and readers are held to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

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

T = 12


def graph(nodes: Sequence[Node], paths: str, timesteps: int = T) -> SpikingGraph:
    """``paths``: names with > between them, paths with a blank between them."""
    edges: dict[tuple[str, str], None] = {}
    for path in paths.split():
        names = path.split(">")
        edges |= dict.fromkeys(pairwise(names))
    return SpikingGraph(nodes=tuple(nodes), edges=tuple(edges), timesteps=timesteps)


def source(*shape: int) -> CurrentSource:
    return CurrentSource(name="input", shape=shape)


def readout(*shape: int) -> Readout:
    return Readout(name="output", shape=shape)


def neurons(name: str, *shape: int, threshold: Tensor | None = None) -> Neurons:
    return Neurons(
        name=name, shape=shape, threshold=torch.ones((), dtype=torch.float64) if threshold is None else threshold
    )


def dense(name: str, outs: int, ins: int) -> Dense:
    weight, bias = torch.randn(outs, ins).double() / ins**0.5, torch.randn(outs).double() / 10
    return Dense(name=name, shape=(outs,), weight=weight, bias=bias)


def conv(name: str, outs: int, comes: tuple[int, ...], kernel: int, stride: int = 1, padding: int = 0, groups: int = 1) -> Convolution:  # fmt: skip # noqa: E501, PLR0913
    ins = comes[0] // groups
    rows = [(size + 2 * padding - kernel) // stride + 1 for size in comes[1:]]
    return Convolution(
        name=name,
        shape=(outs, rows[0], rows[1]),
        weight=torch.randn(outs, ins, kernel, kernel).double() * 1.5 / (ins * kernel**2) ** 0.5,
        bias=torch.rand(outs).double() / 10,
        stride=(stride, stride),
        padding=(padding, padding),
        groups=groups,
    )


def fully_connected() -> SpikingGraph:
    nodes = [source(6), dense("first", 9, 6), neurons("n1", 9), dense("second", 7, 9), neurons("n2", 7)]
    return graph([*nodes, dense("last", 3, 7), readout(3)], "input>first>n1>second>n2>last>output")


def convolutional() -> SpikingGraph:
    """Thresholds of channels, and a 2x2 pool and a 3x3 convolution as one 6x6 convolution of stride 2; names as modules
    have them."""
    thresholds = torch.rand(4).double() + 0.5
    nodes = [
        source(2, 8, 8), conv("features.0", 4, (2, 8, 8), 3, 1, 1), neurons("graph", 4, 8, 8, threshold=thresholds),
        conv("lambda", 6, (4, 8, 8), 6, 2, 2), neurons("2.relu", 6, 4, 4), Flatten(name="flatten", shape=(96,)),
        dense("fc", 5, 96), neurons("fc_relu", 5), dense("linear", 3, 5), readout(3),
    ]  # fmt: skip
    return graph(nodes, "input>features.0>graph>lambda>2.relu>flatten>fc>fc_relu>linear>output")


def residual() -> SpikingGraph:
    """A block whose shortcut is a strided convolution, one whose shortcut scales channels, and one with two edges from
    neurons to neurons."""
    nodes = [
        source(2, 8, 8), conv("a", 4, (2, 8, 8), 3, 1, 1), neurons("n0", 4, 8, 8),
        conv("c1", 6, (4, 8, 8), 3, 2, 1), neurons("n1", 6, 4, 4), conv("c2", 6, (6, 4, 4), 3, 1, 1),
        conv("s", 6, (4, 8, 8), 1, 2), neurons("n2", 6, 4, 4),
        conv("d1", 6, (6, 4, 4), 3, 1, 1), neurons("n3", 6, 4, 4), conv("d2", 6, (6, 4, 4), 3, 1, 1),
        conv("s2", 6, (6, 4, 4), 1, groups=6), neurons("n4", 6, 4, 4),
        conv("e1", 6, (6, 4, 4), 3, 1, 1), neurons("n5", 6, 4, 4), conv("e2", 6, (6, 4, 4), 3, 1, 1),
        neurons("n6", 6, 4, 4), Flatten(name="f", shape=(96,)), dense("c", 3, 96), readout(3),
    ]  # fmt: skip
    return graph(
        nodes, "n2>s2>n4 n4>n6 input>a>n0>c1>n1>c2>n2>d1>n3>d2>n4>e1>n5>e2>n6>f>c>output n0>s>n2"
    )  # fmt: skip


def two_branches() -> SpikingGraph:
    """Both branches have layers of their own, of different sizes."""
    nodes = [
        source(6), dense("first", 8, 6), neurons("n", 8), dense("a", 5, 8), neurons("na", 5), dense("a2", 7, 5),
        dense("b", 4, 8), neurons("nb", 4), dense("b2", 7, 4), neurons("both", 7), dense("last", 3, 7), readout(3),
    ]  # fmt: skip
    return graph(nodes, "input>first>n>a>na>a2>both n>b>nb>b2>both>last>output")


GRAPHS = {one.__name__: one for one in (fully_connected, convolutional, residual, two_branches)}


def made(name: str) -> SpikingGraph:
    torch.manual_seed(7)
    return GRAPHS[name]()


def examples(spiking: SpikingGraph, count: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(count, *spiking.source.shape, generator=generator).double()


# A graph whose counts were computed by hand. For the input 0.5 the membrane of ``first`` is 0.5, 1, 1.5, ... where
# nothing fires, and the current into ``second`` is -1.75, or 5.25 in a step in which ``first`` fires.

STEPS = 6
COUNTS = {
    # first: 0.5, 1, 1.5 (fires) 0.5, 1, 1.5 (fires) 0.5, 1; second: -1.75, -3.5, 1.75 (fires) 0.75, -1, 4.25 (fires)
    # 3.25, 1.5 (fires) 0.5
    "nir": (2, 3),
    # first: 0.5, 1 (fires) 0, 3 times; second: -1.75 (clipped) -1, 4.25 (fires 4 times) 0.25, -1.5 (clipped) -1, ...
    "sinabs": (3, 12),
    # first: 0.5, 1 (fires) 0, 3 times; second: -1.75, 3.5 (fires) 0, 3 times
    "spikingjelly": (3, 3),
    # first: 0.5, 1, 1.5 (fires) 0, twice; second: -1.75, -3.5, 1.75 (fires) 0, twice
    "norse": (2, 2),
}
SUBTRACT_AT_THE_THRESHOLD = (3, 4)
"""The counts where both fire at the threshold and subtract it: second: -1.75, 3.5 (fires) 2.5, 0.75, 6 (fires) 5, 3.25
(fires) 2.25, 7.5 (fires) 6.5."""


def traced() -> SpikingGraph:
    def one(name: str, weight: float, bias: float) -> Dense:
        number = torch.tensor([[weight]], dtype=torch.float64)
        return Dense(name=name, shape=(1,), weight=number, bias=torch.tensor([bias], dtype=torch.float64))

    nodes = [source(1), one("a", 1, 0), neurons("first", 1), one("b", 7, -1.75), neurons("second", 1), one("c", 1, 0)]
    return graph([*nodes, readout(1)], "input>a>first>b>second>c>output", STEPS)


HALF = torch.full((1, 1), 0.5, dtype=torch.float64)
