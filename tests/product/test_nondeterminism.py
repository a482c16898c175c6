"""A workload that is not the same when it is repeated is named, and what it makes of itself is no rounding."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import apportion

X = torch.randn(120, 8, generator=torch.Generator().manual_seed(1))
COUNT = itertools.count()


def rows() -> TensorDataset:
    return TensorDataset(X, X[:, :3].argmax(1))


def by_the_clock(samples: list[Any]) -> Any:
    inputs, labels = default_collate(samples)
    return inputs * (1 + 1e-3 * (time.time() % 1)), labels


def of_no_seed(samples: list[Any]) -> Any:
    inputs, labels = default_collate(samples)
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big")))
    return inputs + 1e-4 * noise, labels


class Clocked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-4 * (time.perf_counter() % 1))


def loss_of_a_generator(outputs: Tensor, targets: Tensor) -> Tensor:
    seed = time.time_ns() % (1 << 31)
    noise = torch.randn(outputs.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.cross_entropy(outputs + 1e-4 * noise.to(outputs.dtype), targets)


def workload(**changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        "data": rows,
        "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "batch_size": 40,
    }
    return apportion.Workload(**{**given, **changes})


RESTLESS = {
    "the clock in collate": workload(collate=by_the_clock),
    "a generator of no seed in collate": workload(collate=of_no_seed),
    "the clock in a layer": workload(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Clocked(16, 3))),
    "a generator by the clock in the loss": workload(loss=loss_of_a_generator),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", list(RESTLESS))
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_not_the_same_twice_is_named_and_never_equal(which: str, steps: int) -> None:
    proof = apportion.check(RESTLESS[which], "data_parallel", workers=2, steps=steps)
    assert proof.verdict != "equal"
    assert proof.rounds[0].bound <= 1e-10
    assert "the workload changes by itself" in proof.sentence
    assert not any("by rounding" in line for line in proof.by_design)


class Anneals(nn.Module):
    """Counts its calls: the same whenever the training is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.5**self.calls)


@pytest.mark.thorough
def test_a_layer_that_counts_its_calls_is_no_clock() -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Anneals(), nn.Linear(16, 3))  # noqa: E731
    proof = apportion.check(workload(model=model), "data_parallel", workers=2, steps=3)
    assert proof.rounds[0].verdict == "equal", proof.sentence
