"""The number of loss terms: a default that is wrong is found before the first step, or is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def digits_like(label: int, rows: int = 1500, rare: int = 10) -> TensorDataset:
    """Rows of ten inputs and three classes, of which a few have another label."""
    inputs = torch.randn(rows, 10, generator=torch.Generator().manual_seed(1))
    labels = inputs[:, :3].argmax(1)
    labels[torch.randperm(rows, generator=torch.Generator().manual_seed(4))[:rare]] = label
    return TensorDataset(inputs, labels)


def classifier(label: int, loss: Callable[..., Any], **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)),
        "data": lambda: digits_like(label),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "batch_size": 50,
        "epochs": 3,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


@pytest.mark.thorough
def test_an_explicit_mean_over_examples_trains_as_one_device(trained: Any, furthest: Any) -> None:
    workload = classifier(3, lambda outputs, targets: nn.functional.cross_entropy(outputs, targets))
    assert furthest(trained(workload), trained(workload, "data_parallel", 2)) < 1e-9
