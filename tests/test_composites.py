"""Replicas of networks in parts: data parallel over groups that each hold the whole network."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from ranks import by_value, on_ranks
from torch import nn

import apportion
from apportion import Workload
from apportion.strategies.conv_parallel import ConvParallel
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice
from apportion.strategies.tensor_parallel import TensorParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel
from apportion.strategy import State, Strategy
from apportion.world import World

EXACT = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:.*they take turns")


def prove(workload: Workload, strategy: Strategy, workers: int, steps: int = 5) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    (found,) = proof.rounds
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds
    assert not proof.by_design


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


def mlp(batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(stack, networks.tabular(batch_size, 10), batch_size, **options)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


def normalised(batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(images, networks.tabular(batch_size, 2, 4, 4), batch_size, **options)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=3, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def recurrent(batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(Recurrent, networks.tabular(batch_size, 6, 3), batch_size, **options)


CASES: dict[str, tuple[Strategy, Any]] = {
    "layers": (LayerPlacement(), mlp),
    "layers_normalised": (LayerPlacement(), normalised),
    "pipeline": (PipelineParallel(microbatches=3), mlp),
    "tensor": (TensorParallel(), mlp),
    "tensor_normalised": (TensorParallel(), normalised),
    "conv": (ConvParallel(), normalised),
    "conv_channels": (ConvParallel(split="channel"), normalised),
    "wavefront": (WavefrontParallel(chunk=2), recurrent),
    "hybrid": (HybridParallel(), normalised),
}


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_of_two_are_one_device(name: str) -> None:
    """Batches of 7, and a last one of 1: shares are uneven, and then one replica has none."""
    of, made = CASES[name]
    clipped = {"clip_grad_norm": 0.05} if name != "hybrid" else {}
    prove(made(**clipped), DataParallel(of=of, replicas=2), 4)
