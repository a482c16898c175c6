"""Compiles a network in integers to a file that can be placed, and chooses how many numbers enter at once, and how many
stages it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apportion.exporting.fpga.devices import FpgaDevice
from apportion.exporting.fpga.fixed_point import FixedNet, connections
from apportion.exporting.fpga.lowering import lowered
from apportion.exporting.fpga.netlist import Netlist, pipelined
from apportion.exporting.fpga.tools.synthesis import PlacedCircuit, placed
from apportion.exporting.fpga.verilog_text import CONTROL_PINS, CircuitPorts, written

TRIES = 3
"""How often a circuit is placed, each time with shorter stages, where the clock is not reached."""
LEAST_LUTS_PER_CONNECTION = 2.0
"""Look-up tables for each weight that is not 0: of digits networks in 4 bits about 7, with what adders share."""


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """A circuit that was written to its file."""

    ports: CircuitPorts
    device: FpgaDevice
    connections: int
    """The number of products of a weight and an input in the network."""
    adders: int
    registers: int
    """The number of bits that registers between stages hold."""
    placement: PlacedCircuit | None
    """None: it was not placed."""


def compiled(net: FixedNet, path: Path, device: FpgaDevice, clock_mhz: float, *, place: bool, module: str) -> Circuit:
    """Write the circuit of the network to the path, as a module of this name. Where it is placed and the clock is not
    reached, its stages are made shorter; it is placed three times at the most.

    Raises ValueError, by how much and with the cure, where it does not fit on the device or its clock is too high.
    """
    count = connections(net)
    if count * LEAST_LUTS_PER_CONNECTION > device.luts:
        raise ValueError(
            f"the network has {count} products of a weight and an input, and {device.name} has {device.luts} look-up "
            f"tables: it is {count * LEAST_LUTS_PER_CONNECTION / device.luts:.1f} times too large at the least; prune, "
            "or use fewer channels, larger strides or a larger device"
        )
    netlist = lowered(net)
    ports = _ports(net, netlist, module, device)
    period = 1000 / clock_mhz
    circuit = None
    for _ in range(TRIES if place else 1):
        pipeline = pipelined(netlist, device, period, ports.beats)
        ports = replace(ports, stages=pipeline.count)
        path.write_text(written(netlist, pipeline, ports))
        placement = placed(path, ports.module, device, clock_mhz) if place else None
        made = Circuit(
            ports=ports, device=device, connections=count, adders=sum(len(op.operands) > 1 for op in netlist.ops),
            registers=sum(netlist.ranges[op].width for op, _ in pipeline.registers), placement=placement,
        )  # fmt: skip
        if placement is None or placement.mhz >= clock_mhz:
            return made
        if circuit is None or circuit.placement is None or placement.mhz > circuit.placement.mhz:
            circuit = made
        period *= 0.95 * placement.mhz / clock_mhz
    assert circuit is not None
    assert circuit.placement is not None
    reached = circuit.placement
    raise ValueError(
        f"the circuit reaches {reached.mhz:.1f} MHz on {device.name}, and clock_mhz={clock_mhz:g} was asked for: its "
        f"longest way takes {reached.logic_ns:.1f} ns of logic and {reached.routing_ns:.1f} ns of routing; use "
        f"clock_mhz={int(reached.mhz)}, fewer bits, or a device that is less full"
    )


def _ports(net: FixedNet, netlist: Netlist, module: str, device: FpgaDevice) -> CircuitPorts:
    """Return the ports: as many numbers enter at once as there are pins for."""
    first, last = net.layers[0], net.layers[-1]
    width = max(netlist.ranges[number].width for number in netlist.outputs)
    ports = CircuitPorts(
        module=module, input_shape=first.shape, input_low=first.low, input_high=first.high,
        input_exponent=first.exponent, words=1, beats=1, output_shape=last.shape, output_width=width,
        output_exponent=last.exponent, stages=1,
    )  # fmt: skip
    left = device.pins - CONTROL_PINS - width * len(netlist.outputs)
    if left < ports.input_width:
        raise ValueError(
            f"layer {last.name} has {len(netlist.outputs)} outputs of {width} bits, and {device.name} has {device.pins}"
            f" pins: {ports.input_width - left} too few; use fewer outputs or fewer bits"
        )
    count = int(np.prod(first.shape))
    beats = -(-count // min(left // ports.input_width, count))
    return replace(ports, beats=beats, words=-(-count // beats))
