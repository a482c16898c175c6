"""Lowers a network in integers to a netlist of additions, limits and comparisons.

Products with a constant matrix as few additions of shifted numbers: alkaid's solver of the multiplication of a
vector by a constant matrix, which shares what several outputs have in common (Sun et al., 2025, arXiv:2507.04535).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from apportion.errors import ProgramMissing
from apportion.exporting.fpga.fixed_point import FixedLayer, FixedNet
from apportion.exporting.fpga.netlist import Netlist, Term


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
            "the target verilog needs the package alkaid, which is not installed: pip install 'apportion[fpga]'"
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
