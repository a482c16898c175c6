"""Turns float layers into integers: exponents are chosen on examples for calibration.

Every exponent is the one of the least squared error: of the weights of an output channel by themselves, of an
activation over the examples. Activations are those of the network whose earlier layers are in integers already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from apportion.exporting.fpga.fixed_point import EXACT, FixedLayer, FixedNet, IntegerFormat
from apportion.exporting.fpga.float_layers import FloatLayer

CANDIDATES = 4
"""The number of exponents that are tried: the smallest keeps the largest number, each further one clips more."""
MOST_EXAMPLES = 1024
WIDEST = 8
"""The largest difference between the exponent of a channel's weights and that of all of them: what is smaller is 0."""


def quantized(layers: Sequence[FloatLayer], calibration: Tensor, bits: int) -> FixedNet:
    """Return the network in integers of ``bits`` bits: its input, its weights and what passes from layer to layer.

    ``calibration``: inputs, dimension 0 the example. Raises ValueError where a sum could exceed 2**53.
    """
    walk = _Walk(bits)
    for layer in layers:
        walk.add(layer, calibration[:MOST_EXAMPLES].double())
    return FixedNet(tuple(walk.made), tuple(walk.numbers))


@dataclass(frozen=True)
class _Extent:
    """The integers that a tensor can hold."""

    low: int
    high: int
    narrow: bool
    """Was it requantised, and only summed over a window since?"""


class _Walk:
    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.made: list[FixedLayer] = []
        self._extents: list[_Extent] = []
        self._values: list[Tensor] = []
        self.numbers: list[int] = []  # of the fixed layer, by that of the float layer

    def add(self, layer: FloatLayer, calibration: Tensor) -> None:
        if layer.kind == "input":
            form = chosen(calibration, self._bits, signed=bool(calibration.min() < 0))
            self._append(
                FixedLayer(
                    name=layer.name, kind="input", inputs=(), shape=layer.shape,
                    exponent=form.exponent, low=form.low, high=form.high,
                ),
                _Extent(form.low, form.high, narrow=True),
                calibration,
            )  # fmt: skip
        elif layer.kind in ("linear", "convolution"):
            self._affine(layer)
        elif layer.kind == "relu":
            self._requantise(self.numbers[layer.inputs[0]], layer.name, most=layer.most, relu=True)
        else:
            self._moved(layer)
        self.numbers.append(len(self.made) - 1)

    def _append(self, layer: FixedLayer, extent: _Extent, calibration: Tensor | None = None) -> int:
        if max(abs(extent.low), abs(extent.high)) >= EXACT:
            raise ValueError(f"layer {layer.name} sums up to more than 2**53: use fewer bits or fewer inputs")
        self.made.append(layer)
        self._extents.append(extent)
        values = [self._values[n] for n in layer.inputs]
        net = FixedNet(tuple(self.made))
        self._values.append(layer.format.of(calibration) if calibration is not None else net._of(layer, values))
        return len(self.made) - 1

    def _requantise(self, number: int, name: str, *, most: float | None = None, relu: bool = False) -> int:
        before = self.made[number]
        numbers = self._values[number] / 2.0**before.exponent
        if relu:
            numbers = numbers.clamp(0, most)
        form = chosen(numbers, self._bits, signed=not relu and bool(numbers.min() < 0))
        high = form.high
        if relu and most is not None:
            high = min(high, math.floor(most * 2.0**form.exponent + 0.5))
        layer = FixedLayer(
            name=name, kind="requantise", inputs=(number,), shape=before.shape, exponent=form.exponent,
            low=form.low, high=high, shift=before.exponent - form.exponent,
        )  # fmt: skip
        return self._append(layer, _Extent(form.low, high, narrow=True))

    def _affine(self, layer: FloatLayer) -> None:
        number = self.numbers[layer.inputs[0]]
        if not self._extents[number].narrow:
            number = self._requantise(number, f"{layer.name}, its input")
        before, extent = self.made[number], self._extents[number]
        assert layer.weight is not None
        integers, exponents = weights(layer.weight, self._bits)
        common = int(exponents.max())
        bias = np.zeros(len(integers)) if layer.bias is None else layer.bias.numpy()
        up = 2 ** (common - exponents)
        # The bias is rounded at the scale of its own channel, as its products are, and then moved to the common
        # exponent: so channels keep the precision that they have.
        added = np.floor(bias * 2.0 ** (exponents + before.exponent) + 0.5).astype(np.int64) * up
        integers = integers * up.reshape(-1, *[1] * (integers.ndim - 1))
        flat = integers.reshape(len(integers), -1)
        ends = np.stack([flat * extent.low, flat * extent.high])
        made = FixedLayer(
            name=layer.name, kind=layer.kind, inputs=(number,), shape=layer.shape, arguments=layer.arguments,
            exponent=common + before.exponent, weight=integers, bias=added,
        )  # fmt: skip
        # Of each weight the worse end of its input's range is taken: no sum over fewer inputs, as at the border, leaves
        # this range.
        low = int((np.minimum(ends.min(0), 0).sum(1) + added).min())  # 0: what padding adds
        self._append(made, _Extent(low, int((np.maximum(ends.max(0), 0).sum(1) + added).max()), narrow=False))

    def _moved(self, layer: FloatLayer) -> None:
        numbers = tuple(self.numbers[n] for n in layer.inputs)
        befores, extents = [self.made[n] for n in numbers], [self._extents[n] for n in numbers]
        exponent = max(before.exponent for before in befores)
        made = FixedLayer(
            name=layer.name, kind=layer.kind, inputs=numbers, shape=layer.shape, arguments=layer.arguments,
            exponent=exponent,
        )  # fmt: skip
        extent = extents[0]
        if layer.kind == "add":
            ups = [2 ** (exponent - before.exponent) for before in befores]
            low = sum(e.low * up for e, up in zip(extents, ups, strict=True))
            extent = _Extent(low, sum(e.high * up for e, up in zip(extents, ups, strict=True)), narrow=False)
        elif layer.kind == "average":
            count = layer.arguments[0][0] * layer.arguments[0][1]
            made = replace(made, exponent=exponent + count.bit_length() - 1)
            extent = _Extent(extent.low * count, extent.high * count, extent.narrow)
        self._append(made, extent)


def chosen(numbers: Tensor, bits: int, *, signed: bool) -> IntegerFormat:
    """Return the format of ``bits`` bits in which these numbers have the least squared error."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    largest = float(numbers.abs().max())
    if not 0 < largest < math.inf:
        return IntegerFormat(low, high, 0)
    # The largest exponent at which the largest number still rounds to ``high``: from there each further one halves the
    # step and clips more.
    first = math.floor(math.log2((high + 0.5) / largest))
    tried = [IntegerFormat(low, high, first + n) for n in range(CANDIDATES)]
    errors = [float((form.of(numbers) / 2.0**form.exponent - numbers).square().sum()) for form in tried]
    return tried[int(np.argmin(errors))]


def weights(weight: Tensor, bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the integers of ``bits`` bits of a weight, and the exponent of each output channel."""
    integers, exponents = [], []
    rows = weight.detach().double()
    most = chosen(rows, bits, signed=True).exponent + WIDEST
    for row in rows:
        form = chosen(row, bits, signed=True)
        form = replace(form, exponent=min(form.exponent, most))
        integers.append(form.of(row).numpy().astype(np.int64))
        exponents.append(form.exponent)
    return np.stack(integers), np.array(exponents, dtype=np.int64)
