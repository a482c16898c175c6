"""The share of a rank in a gradient: the bits that autograd gives where the weight is the gradient of the loss."""

from __future__ import annotations

import networks
import pytest
import torch
from torch import Tensor, nn

from apportion.parallel.replica.replica import Replica

WEIGHTS = (1.0, 0.5, 1 / 3, 7 / 15, 0.0)


@pytest.fixture
def replica() -> Replica:
    return Replica(networks.workload(lambda: nn.Linear(3, 2), list, 1), rank=0, device=torch.device("cpu"))


def loss_of(replica: Replica, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value: Tensor = replica.model(x).square().mean().to(dtype)
    return value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weighted_gradient_has_the_bits_of_one_that_autograd_is_given(
    replica: Replica, weight: float, dtype: torch.dtype
) -> None:
    parameters = list(replica.model.parameters())
    loss = loss_of(replica, dtype)
    expected = torch.autograd.grad(loss, parameters, torch.full_like(loss, weight))
    replica.backward(loss_of(replica, dtype), weight)
    assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected, strict=True) if p.grad is not None)
    assert all(p.grad is not None for p in parameters)
    (name,) = replica.optimizers
    replica.gradient(loss_of(replica, dtype), weight, name)
    assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected, strict=True) if p.grad is not None)


def test_rows_without_a_loss_term_add_nothing(replica: Replica) -> None:
    """A mean of nothing is no number, and its weight is 0."""
    weight = next(replica.model.parameters())
    replica.backward(weight.sum() * torch.tensor([]).mean().nan_to_num(1.0) + torch.tensor(torch.nan), 0.0)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
