"""conv_parallel computes the network of one device, on real processes; what it cannot cut it refuses by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from networks import momentum, numbers, tabular, workload
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.address import load_workload
from apportion.parallel.one_device import OneDeviceStep
from apportion.strategies.conv_parallel import ConvParallel
from apportion.world import World

EXACT = 1e-10


def prove(made: Workload, strategy: ConvParallel, workers: int) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(made, strategy, workers=workers, steps=8)
    (found,) = proof.rounds
    assert found.steps == 8
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(4),
        nn.Conv2d(6, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.0),
        nn.Linear(4 * 2 * 2, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(("split", "optimizer"), [("height", adam), ("width", momentum), ("channel", adam)])
def test_equals_one_device(split: Any, optimizer: Any, workers: int) -> None:
    made = workload(normalised, tabular(6, 2, 11, 9), 6, optimizer=optimizer, clip_grad_norm=1.0)
    prove(made, ConvParallel(split=split), workers)
