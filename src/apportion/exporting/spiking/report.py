"""What a spiking net costs beside the net itself: spikes, synaptic operations, joules by published figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from apportion.exporting.spiking.energy import CHIPS, FLOAT_MAC, INT8_MAC, MAC_SOURCE
from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.simulator import Simulated, fan_out
from apportion.exporting.target import Table


@dataclass(frozen=True, kw_only=True)
class SpikingCost:
    """The means of some examples, for one example."""

    examples: int
    layers: tuple[tuple[str, int, float, float], ...]
    """(layer, neurons, spikes, synaptic operations)."""
    input_macs: int
    """Multiplications of the inputs' current, which flows into the first layer and is no spikes."""
    macs: int
    """Multiplications and additions of the net itself."""

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
    input_macs = int(fan_out(graph, graph.source.name).sum())
    return SpikingCost(examples=count, layers=layers, input_macs=input_macs, macs=multiplications(module, sample))


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
        (name, neurons, round(spikes, 1), round(spikes / neurons / graph.timesteps, 4), round(operations))
        for name, neurons, spikes, operations in found.layers
    ]
    rows.append(("all", sum(row[1] for row in rows), round(found.spikes, 1), "", round(found.operations)))
    spent = Table(
        title="Spikes and synaptic operations of an example",
        columns=("layer", "neurons", "spikes", "spikes of a neuron in a step", "synaptic operations"),
        rows=tuple(rows),
        note=f"Means of {found.examples} calibration examples over {graph.timesteps} steps. The net itself takes "
        f"{found.macs:,} multiplications and additions for an example. The inputs flow into the first layer as a "
        f"{'current of the first step' if once else 'constant current'}, {found.input_macs:,} multiplications for an "
        "example where they are computed once, which are in no column.",
    )
    energy = [(chip.name, chip.joules * 1e12, found.operations * chip.joules, chip.source) for chip in CHIPS]
    energy.append(("the net, float32 (45 nm)", FLOAT_MAC * 1e12, found.macs * FLOAT_MAC, MAC_SOURCE))
    energy.append(("the net, int8 (45 nm)", INT8_MAC * 1e12, found.macs * INT8_MAC, MAC_SOURCE))
    joules = Table(
        title="Energy of an example, predicted",
        columns=("hardware", "pJ an operation", "J an example", "source of the figure"),
        rows=tuple((name, round(each, 2), float(f"{total:.3g}"), source) for name, each, total, source in energy),
        note="Operations times a published figure for one of them: not measured, without the chip at rest, without "
        "what moves the inputs, and from processes of several years.",
    )
    return spent, joules


def conclusion(found: SpikingCost) -> str:
    """Whether spikes are worth it, by the same figures."""
    ratio = found.operations / found.macs
    said = (
        f"An example takes {found.operations:,.0f} synaptic operations, {ratio:.2f} for each multiplication of the net"
    )
    best = min(CHIPS, key=lambda chip: chip.joules)
    spiking, dense, narrow = found.operations * best.joules, found.macs * FLOAT_MAC, found.macs * INT8_MAC
    if spiking >= dense:
        return f"{said}: spiking wins nothing here, on any of the chips whose figures are known."
    winners = [chip.name for chip in CHIPS if found.operations * chip.joules < dense]
    less = f"by published figures {' and '.join(winners)} would take less energy than float32 in 45 nm"
    if spiking >= narrow:
        return f"{said}: {less}, but none less than int8 in 45 nm, beside which spiking wins nothing here."
    return f"{said}: {less}, and {best.name} less than int8 in 45 nm too."
