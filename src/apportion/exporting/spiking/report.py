"""What a spiking net costs beside the net itself: spikes, synaptic operations, joules by published figures.

What chips are said to take for a synaptic operation, and what a multiplication takes in ordinary hardware.

The figures are published ones, each from a design of another year and process, measured with another network: they tell
orders of magnitude. They hold the operation and its memory, not the chip at rest nor the input and output.

The neuromorphic chips that the README of NIR names, with the program that takes files to each of them.

The loader of a chip's own program has read no file here: the programs that read them are simulators, ours or others'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.simulator import Simulated, fan_out
from apportion.exporting.target import Table

SIMULATED = "simulated"
"""What the table states of a chip whose own loader has not read the file."""


@dataclass(frozen=True, kw_only=True)
class ChipLoader:
    """A chip, and the program by which NIR files come to it."""

    chip: str
    loader: str
    """The program that takes NIR files for it."""
    dialect: str
    """The dialect that comes nearest to its neurons."""


LOADERS = (
    ChipLoader(
        chip="Speck (SynSense)", loader="sinabs with its driver, sinabs-dynapcnn", dialect="sinabs",
    ),
    ChipLoader(
        chip="Xylo (SynSense)", loader="rockpool", dialect="nir",
    ),
    ChipLoader(
        chip="Loihi 2 (Intel)", loader="lava-dl", dialect="nir",
    ),
    ChipLoader(
        chip="SpiNNaker2 (SpiNNcloud)", loader="py-spinnaker2", dialect="nir",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A neuromorphic chip."""

    name: str
    joules: float
    """For a synaptic operation, in joules."""
    source: str


CHIPS = (
    Chip(name="Loihi (14 nm)", joules=23.6e-12, source="Davies et al., IEEE Micro 38(1), 2018"),
    Chip(name="TrueNorth (28 nm)", joules=26e-12, source="Merolla et al., Science 345, 2014"),
    Chip(name="ODIN (28 nm)", joules=12.7e-12, source="Frenkel et al., IEEE TBioCAS 13(1), 2019"),
    Chip(name="SpiNNaker2 (22 nm)", joules=10e-12, source="Höppner et al., arXiv 2103.08392, 2021"),
    Chip(name="SENECA (22 nm)", joules=2.8e-12, source="Tang et al., Frontiers in Neuroscience 17, 2023"),
)
FLOAT_MAC, FLOAT_ADD = 4.6e-12, 0.9e-12
"""A multiplication and an addition of float32 in 45 nm, in joules: 3.7 and 0.9 pJ; and the addition alone."""
INT8_MAC, INT_ADD = 0.3e-12, 0.1e-12
"""A multiplication of int8 and an addition of int32 in 45 nm, in joules: 0.2 and 0.1 pJ; and the addition alone."""
MAC_SOURCE = "Horowitz, ISSCC 2014"


@dataclass(frozen=True, kw_only=True)
class SpikingCost:
    """The means of some examples, for one example."""

    examples: int
    layers: tuple[tuple[str, int, float, float], ...]
    """(layer, neurons, spikes, synaptic operations)."""
    silent: tuple[int, ...]
    """The neurons of each layer whose count of spikes is 0 in all examples."""
    input_macs: int
    """Multiplications of the inputs' current, which flows into the first layer and does not consist of spikes."""
    macs: int
    """Multiplications and additions of the net itself."""
    timesteps: int

    @property
    def neurons(self) -> int:
        """The neurons of all layers, which are the activations of the net."""
        return sum(neurons for _, neurons, _, _ in self.layers)

    @property
    def updates(self) -> int:
        """The updates of membranes: of each neuron in each step, whether or not a spike has come."""
        return self.neurons * self.timesteps

    def spiking(self, chip: Chip) -> tuple[float, float]:
        """The least and the largest number of joules of an example on a chip: its synaptic operations, the
        multiplications of the inputs' current at the price of float32, and updates of membranes that each take an
        addition of integers at the least, and a synaptic operation of the chip at the most."""
        certain = self.operations * chip.joules + self.input_macs * FLOAT_MAC
        return certain + self.updates * INT_ADD, certain + self.updates * chip.joules

    @property
    def float32(self) -> float:
        """The joules of the net itself in float32: its multiplications, and an addition for each activation."""
        return self.macs * FLOAT_MAC + self.neurons * FLOAT_ADD

    @property
    def int8(self) -> float:
        """The joules of the net itself in integers of 8 bits, counted as in ``float32``."""
        return self.macs * INT8_MAC + self.neurons * INT_ADD

    @property
    def spikes(self) -> float:
        """The spikes of all layers."""
        return sum(spikes for _, _, spikes, _ in self.layers)

    @property
    def operations(self) -> float:
        """The synaptic operations of all layers."""
        return sum(operations for _, _, _, operations in self.layers)


def cost(graph: SpikingGraph, found: Sequence[Simulated], module: nn.Module, sample: Tensor) -> SpikingCost:
    """The cost of a graph by what it has fired for some batches."""
    count = sum(len(one.outputs) for one in found)
    layers = tuple(
        (
            node.name,
            math.prod(node.shape),
            sum(float(one.spikes[node.name].sum()) for one in found) / count,
            sum(float(one.operations[node.name].double().sum()) for one in found) / count,
        )
        for node in graph.neurons
    )
    fired = [torch.stack([(one.counts[node.name] != 0).any(0) for one in found]).any(0) for node in graph.neurons]
    input_macs = int(fan_out(graph, graph.source.name).sum())
    return SpikingCost(
        examples=count,
        layers=layers,
        silent=tuple(int((~each).sum()) for each in fired),
        input_macs=input_macs,
        macs=multiplications(module, sample),
        timesteps=graph.timesteps,
    )


def multiplications(module: nn.Module, sample: Tensor) -> int:
    """Multiplications and additions of the net for one example."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(sample)
    return int(counter.get_total_flops()) // 2 // len(sample)


def tables(graph: SpikingGraph, found: SpikingCost) -> tuple[Table, ...]:
    """The spikes of each layer, and the joules by each chip's figure."""
    once = graph.current == "first_step"
    rows: list[tuple[Any, ...]] = [
        (name, neurons, silent, round(spikes, 1), round(spikes / neurons / graph.timesteps, 4), round(operations))
        for (name, neurons, spikes, operations), silent in zip(found.layers, found.silent, strict=True)
    ]
    rows.append(("all", found.neurons, sum(found.silent), round(found.spikes, 1), "", round(found.operations)))
    spent = Table(
        title="Spikes and synaptic operations of an example",
        columns=("layer", "neurons", "silent", "spikes", "spikes of a neuron in a step", "synaptic operations"),
        rows=tuple(rows),
        note=f"Means of {found.examples} calibration examples over {graph.timesteps} steps. Silent neurons have a "
        f"count of 0 for all of them. The net itself takes "
        f"{found.macs:,} multiplications and additions for an example. The inputs flow into the first layer as a "
        f"{'current of the first step' if once else 'constant current'}, {found.input_macs:,} multiplications for an "
        f"example where they are computed once, which are in no column, nor are the {found.updates:,} updates of "
        "membranes; both are in the energy.",
    )
    energy = [(chip.name, chip.joules * 1e12, *found.spiking(chip), chip.source) for chip in CHIPS]
    energy.append(("the net, float32 (45 nm)", FLOAT_MAC * 1e12, found.float32, found.float32, MAC_SOURCE))
    energy.append(("the net, int8 (45 nm)", INT8_MAC * 1e12, found.int8, found.int8, MAC_SOURCE))
    joules = Table(
        title="Energy of an example, predicted",
        columns=(
            "hardware",
            "pJ an operation",
            "J an example, at least",
            "J an example, at most",
            "source of the figure",
        ),
        rows=tuple(
            (name, round(each, 2), float(f"{least:.3g}"), float(f"{most:.3g}"), source)
            for name, each, least, most, source in energy
        ),
        note="Operations times a published figure for one of them: not measured, without the chip at rest, without "
        "what moves the inputs, and from processes of several years. The multiplications of the inputs' current count "
        f"at {FLOAT_MAC * 1e12:g} pJ on every chip, as in the net, and each update of a membrane as an addition of "
        f"integers, {INT_ADD * 1e12:g} pJ, at least, and as a synaptic operation of the chip at most.",
    )
    chips = Table(
        title="Chips that NIR files are for",
        columns=("chip", "its loader", "dialect", "this file"),
        rows=tuple((one.chip, one.loader, one.dialect, SIMULATED) for one in LOADERS),
        note=f"{SIMULATED}: the chip's own loader has not read this file, and no chip has run it. This file begins "
        "with a current, and its last layer has no neurons: where a loader takes spikes alone, the first layer is "
        "computed beside the chip.",
    )
    return spent, joules, chips


def conclusion(found: SpikingCost) -> str:
    """Whether spikes are worth it, by the same figures."""
    each = f"{found.operations / found.macs:.2f} for each multiplication of the net" if found.macs else ""
    operations = (
        f"An example takes {found.operations:,.0f} synaptic operations, {each or 'and the net no multiplication'}"
    )
    surely = [chip for chip in CHIPS if found.spiking(chip)[1] < found.float32]
    perhaps = [chip for chip in CHIPS if found.spiking(chip)[0] < found.float32 <= found.spiking(chip)[1]]
    best = min(CHIPS, key=lambda chip: found.spiking(chip)[1])
    least, most = found.spiking(best)
    span = (
        f"with the multiplications of the inputs and the updates of membranes, {best.name} would take "
        f"{_nanojoules(least)} to {_nanojoules(most)} by published figures, beside {_nanojoules(found.float32)} of the "
        f"net in float32 and {_nanojoules(found.int8)} in int8 (45 nm)"
    )
    if not surely and not perhaps:
        return f"{operations}; {span}: spiking wins nothing here, on any of the chips whose figures are known."
    words = [f"{_listed(surely)} would take less energy than float32"] if surely else []
    words += [f"{_listed(perhaps)} might, by what an update of a membrane takes"] if perhaps else []
    if most >= found.int8:
        words.append("none surely less than int8, beside which spiking wins nothing here")
    else:
        words.append(f"{best.name} less than int8, too")
    return f"{operations}; {span}: {'; '.join(words)}."


def _nanojoules(joules: float) -> str:
    return f"{joules * 1e9:.3g} nJ"


def _listed(chips: Sequence[Chip]) -> str:
    return " and ".join(chip.name for chip in chips)
