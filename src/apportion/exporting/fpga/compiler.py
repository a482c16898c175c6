"""Compiles a network in integers to a file that can be placed, and chooses how many numbers enter at once, and how many
stages it has."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from apportion.errors import ProgramMissing
from apportion.exporting.fpga.devices import FpgaDevice
from apportion.exporting.fpga.fixed_point import FixedLayer, FixedNet, connections
from apportion.exporting.fpga.netlist import Netlist, Term, pipelined
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


# Lowers a network in integers to a netlist of additions, limits and comparisons.
#
# Products with a constant matrix as few additions of shifted numbers: alkaid's solver of the multiplication of a
# vector by a constant matrix, which shares what several outputs have in common (Sun et al., 2025, arXiv:2507.04535).


def products(matrix: NDArray[np.int64], terms: Sequence[Term]) -> list[Term]:
    """Return matrix @ terms: the terms of its rows, with the operations that they need added to the netlist."""
    netlist = terms[0].netlist
    moving = np.array([term.op is not None for term in terms])
    used = np.flatnonzero(matrix.any(axis=0) & moving)
    added = (matrix @ np.array([term.constant for term in terms], dtype=np.int64)).tolist()
    if not used.size:
        return [Term(netlist, None, constant=c) for c in added]
    ranges = [replace(terms[n], constant=0).range for n in used.tolist()]
    first, second = _solver()(
        np.ascontiguousarray(matrix[:, used].T, dtype=np.float32),
        qintervals=[(float(x.low), float(x.high), 1.0) for x in ranges],
        latencies=[0.0] * len(used),
    )
    given = np.empty(len(used), dtype=object)
    given[:] = [replace(terms[n], constant=0) for n in used.tolist()]
    found = second(first(given, quantize=False), quantize=False)
    made = [x if isinstance(x, Term) else Term(netlist, None) for x in found]
    return [x + c for x, c in zip(made, added, strict=True)]


def version() -> str:
    """Return the version of alkaid."""
    _solver()
    found: str = importlib.metadata.version("alkaid")
    return found


def _solver() -> Any:
    try:
        from alkaid.cmvm import cmvm_solve
    except ImportError:
        raise ProgramMissing(
            "the target verilog needs the package alkaid, which is not installed: in a clone of apportion, "
            "pip install '.[fpga]'"
        ) from None
    return cmvm_solve


def lowered(net: FixedNet) -> Netlist:
    """Return the netlist that computes the network; its outputs are the integers of the last layer, in C order."""
    netlist = Netlist()
    values: list[NDArray[np.object_]] = []
    for layer in net.layers:
        values.append(_of(layer, netlist, net, values))
    netlist.outputs = [netlist.settled(term) for term in values[-1].reshape(-1)]
    return netlist.living()


def _of(layer: FixedLayer, netlist: Netlist, net: FixedNet, values: list[NDArray[np.object_]]) -> NDArray[np.object_]:
    given = [values[n] for n in layer.inputs]
    if layer.kind == "input":
        count = int(np.prod(layer.shape))
        return _array([netlist.input(n, layer.low, layer.high) for n in range(count)], layer.shape)
    if layer.kind in ("linear", "convolution"):
        matrix, constants = matrix_of(layer, given[0].shape)
        found = products(matrix, list(given[0].reshape(-1)))
        return _array([x + c for x, c in zip(found, constants.tolist(), strict=True)], layer.shape)
    if layer.kind == "requantise":
        terms = given[0].reshape(-1)
        return _array([netlist.requantised(x, layer.shift, layer.low, layer.high) for x in terms], layer.shape)
    if layer.kind == "add":
        ups = [2.0 ** (layer.exponent - net.layers[n].exponent) for n in layer.inputs]
        pairs = zip(given[0].reshape(-1), given[1].reshape(-1), strict=True)
        return _array([a * ups[0] + b * ups[1] for a, b in pairs], layer.shape)
    if layer.kind == "reshape":
        return given[0].reshape(layer.shape)
    windows = windows_of(layer, given[0].shape)
    flat = given[0].reshape(-1)
    joined = _total if layer.kind == "average" else _largest
    return _array([joined([flat[n] for n in window]) for window in windows], layer.shape)


def matrix_of(layer: FixedLayer, given: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a linear layer or a convolution as a matrix over all that it reads, and the constant of each output."""
    assert layer.weight is not None
    assert layer.bias is not None
    if layer.kind == "linear":
        return layer.weight, layer.bias
    count = int(np.prod(given))
    unit = torch.eye(count, dtype=torch.float64).reshape(count, *given)
    columns = F.conv2d(unit, torch.from_numpy(layer.weight).double(), None, *layer.arguments).reshape(count, -1)
    repeats = int(np.prod(layer.shape[1:]))
    return columns.T.numpy().astype(np.int64), np.repeat(layer.bias, repeats)


def windows_of(layer: FixedLayer, given: tuple[int, ...]) -> list[list[int]]:
    """Return the numbers of the inputs, in C order, that each output of a pool is taken from; padding is left out."""
    window, stride, padding = layer.arguments
    channels, height, width = given
    _, rows, columns = layer.shape
    found = []
    for channel in range(channels):
        for row in range(rows):
            for column in range(columns):
                top, left = row * stride[0] - padding[0], column * stride[1] - padding[1]
                found.append(
                    [
                        (channel * height + y) * width + x
                        for y in range(max(top, 0), min(top + window[0], height))
                        for x in range(max(left, 0), min(left + window[1], width))
                    ]
                )
    return found


def _array(terms: list[Term], shape: tuple[int, ...]) -> NDArray[np.object_]:
    made = np.empty(len(terms), dtype=object)
    made[:] = terms
    return made.reshape(shape)


def _total(terms: list[Term]) -> Term:
    # A balanced tree: its depth, and with it the number of stages, grows with the logarithm of the window.
    while len(terms) > 1:
        terms = [terms[n] + terms[n + 1] if n + 1 < len(terms) else terms[n] for n in range(0, len(terms), 2)]
    return terms[0]


def _largest(terms: list[Term]) -> Term:
    netlist = terms[0].netlist
    numbers = [netlist.settled(term) for term in terms]
    # A balanced tree, as above.
    while len(numbers) > 1:
        numbers = [
            netlist.larger(*numbers[n : n + 2]) if n + 1 < len(numbers) else numbers[n]
            for n in range(0, len(numbers), 2)
        ]
    return Term(netlist, numbers[0])
