"""Which tensors of a forward pass count as computed: what depends on parameters and inputs, and no constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from apportion.runtime.worker.determinism import Observed

MASK = torch.full((5, 5), -1e9).triu(1)


class Layer(nn.Linear):
    def __init__(self, compute: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__(5, 5, dtype=torch.float64)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def narrow(compute: Callable[[Layer, Tensor], Tensor], inputs: Tensor | None = None) -> set[str]:
    seen, layer = Observed(), Layer(compute)
    seen.watch(layer)
    layer(torch.ones(3, 5, dtype=torch.float64) if inputs is None else inputs)
    return seen.narrow


@pytest.mark.parametrize(
    "compute",
    [
        lambda layer, x: (x @ layer.weight) @ torch.full((5, 5), -1e9).triu(1).to(x.dtype),
        lambda layer, x: (x @ layer.weight) @ MASK.exp().to(x.dtype),
        lambda layer, x: x + torch.arange(5).float().mul(0.1).exp().double(),
        lambda layer, x: x * (torch.rand(3, 1) < 0.8),
        lambda layer, x: x + ((x > 0).float() - 1.0).mul(1e9).double(),
    ],
)
def test_a_constant_made_in_float32_is_no_computation_in_float32(compute: Callable[[Layer, Tensor], Tensor]) -> None:
    assert not narrow(compute)


@pytest.mark.parametrize(
    "compute",
    [
        lambda layer, x: x.float().double(),
        lambda layer, x: (MASK @ layer.weight.float()).double(),
        lambda layer, x: torch.zeros(3, 5).copy_(x).exp().double(),
        lambda layer, x: torch.zeros(3, 5).add_(x.mean()).double(),
    ],
)
def test_what_depends_on_weights_or_inputs_counts(compute: Callable[[Layer, Tensor], Tensor]) -> None:
    assert narrow(compute)


def test_inputs_that_the_network_is_given_in_float32_count() -> None:
    assert narrow(lambda layer, x: x.exp().double(), torch.ones(3, 5))
