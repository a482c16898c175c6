"""The network in integers: the definition that a circuit is held to, bit for bit.

A tensor is integers q with one exponent e, and means q / 2**e.

============  ======================================================================================================
input         q = floor(x * 2**e + 1/2), limited to the format's smallest and largest integer
affine        q = the sum of weights times q of its input, and the bias; nothing is rounded and nothing overflows
requantise    q' = floor((q + 2**(s-1)) / 2**s), limited to the format's smallest and largest integer, where s is the
              difference of the exponents (rounding half up); for s <= 0 it is q * 2**-s, limited in the same way. A
              ReLU is a format whose smallest integer is 0
add           both multiplied by a power of two, to the larger of their exponents, and added
average       the sum over the window; the exponent grows by the logarithm of the window's size
maximum       the largest of the window; padding never wins
reshape       the same integers in another shape
============  ======================================================================================================

Weights of ``bits`` bits have a power of two of their own in each output channel; the weights that are written here are
multiplied by it, so that a tensor has one exponent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

EXACT = 2**53
"""The integers below it are exact in float64."""


@dataclass(frozen=True)
class IntegerFormat:
    """Integers from ``low`` to ``high`` that mean themselves over 2**exponent."""

    low: int
    high: int
    exponent: int

    def of(self, numbers: Tensor) -> Tensor:
        """Return the nearest integers of this format, halves rounded up, in float64."""
        scaled = torch.floor(numbers.double() * 2.0**self.exponent + 0.5)
        return scaled.clamp(self.low, self.high)


@dataclass(frozen=True, eq=False, kw_only=True)
class FixedLayer:
    """A layer in integers, with the numbers of the layers that it reads."""

    name: str
    kind: str
    """The kind: "input", "linear", "convolution", "requantise", "add", "average", "maximum" or "reshape"."""
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    exponent: int
    weight: NDArray[np.int64] | None = None
    bias: NDArray[np.int64] | None = None
    arguments: tuple[Any, ...] = ()
    low: int = 0
    high: int = 0
    """The smallest and the largest integer of an input or of what is requantised."""
    shift: int = 0
    """The shift s of what is requantised."""

    @property
    def format(self) -> IntegerFormat:
        return IntegerFormat(self.low, self.high, self.exponent)


@dataclass(frozen=True, eq=False)
class FixedNet:
    """A network in integers; the last layer is its output."""

    layers: tuple[FixedLayer, ...]
    numbers: tuple[int, ...] = ()
    """The number of the layer, among these, that each layer of the float network has become."""

    def integers(self, inputs: Tensor) -> list[Tensor]:
        """Return the integers of each layer for these inputs of the float network, exactly, in float64."""
        found: list[Tensor] = []
        for layer in self.layers:
            values = [found[n] for n in layer.inputs]
            found.append(layer.format.of(inputs) if layer.kind == "input" else self._of(layer, values))
        return found

    def outputs(self, inputs: Tensor) -> NDArray[np.float64]:
        """Return what the outputs mean: integers over a power of two, exactly."""
        return (self.integers(inputs)[-1] / 2.0 ** self.layers[-1].exponent).numpy()

    def _of(self, layer: FixedLayer, values: Sequence[Tensor]) -> Tensor:
        first = values[0]
        if layer.kind in ("linear", "convolution"):
            weight, bias = torch.from_numpy(layer.weight).double(), torch.from_numpy(layer.bias).double()
            if layer.kind == "linear":
                return F.linear(first, weight, bias)
            return F.conv2d(first, weight, bias, *layer.arguments)
        if layer.kind == "requantise":
            # Exact: a product with a power of two only changes the exponent of a float64, and every integer is below
            # 2**53. floor(x + 1/2) then rounds halves up, also below 0, as the circuit does.
            scaled = first * 2.0**-layer.shift
            return torch.floor(scaled + (0.5 if layer.shift > 0 else 0)).clamp(layer.low, layer.high)
        if layer.kind == "add":
            exponents = [self.layers[n].exponent for n in layer.inputs]
            # The common exponent is the larger one, so that no factor is below 1 and nothing is rounded.
            return torch.stack([x * 2.0 ** (layer.exponent - e) for x, e in zip(values, exponents, strict=True)]).sum(0)
        if layer.kind == "average":
            window = layer.arguments[0]
            # The window has 2**k numbers, so that the division of the pool and this product cancel exactly in float64;
            # the division itself is the change of the exponent.
            total: Tensor = F.avg_pool2d(first, *layer.arguments) * (window[0] * window[1])
            return total
        if layer.kind == "maximum":
            largest: Tensor = F.max_pool2d(first, *layer.arguments)
            return largest
        return first.reshape(len(first), *layer.shape)


def connections(net: FixedNet) -> int:
    """Return the number of products of a weight that is not 0 with an input that the layers add, for one example."""
    total = 0
    for layer in net.layers:
        if layer.weight is not None:  # a convolution has a product for every position
            total += int(np.count_nonzero(layer.weight)) * int(np.prod(layer.shape[1:]))
    return total
