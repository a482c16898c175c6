"""A worker of a sliced network is killed: the run goes on as if nothing had happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from killed import faults_of, saved
from ranks import by_value
from torch import Tensor, nn
from torch.utils.data import Dataset

import apportion
from apportion import Workload
from apportion.core.strategy import Strategy
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.tensor_parallel import TensorParallel

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


class Slow(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = networks.numbers(25, 2, 6, 6), networks.classes(25, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.0005)
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
        self.classifier = nn.Sequential(nn.Linear(64, 7), nn.ReLU(), nn.Dropout(0.2), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def slow() -> Workload:
    adam = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    return networks.workload(Net, Slow, 8, optimizer=adam, clip_grad_norm=1.0, steps=120)


def trained(strategy: Strategy, workers: int, run_dir: Path, doomed: Sequence[int] = ()) -> list[apportion.Event]:
    with by_value(sys.modules[__name__]):
        return faults_of(slow(), strategy, workers, run_dir, doomed)


TENSOR, ALL, ROTATE = TensorParallel(), HybridParallel(), HybridParallel(exchange="rotate")


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        *((TENSOR, 3), (ALL, 2), (ROTATE, 3)),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in ((TENSOR, 2), (ALL, 3), (ROTATE, 2))),
    ],
    ids=str,
)
@pytest.mark.thorough
def test_any_rank_may_be_killed_and_nothing_is_lost(strategy: Strategy, workers: int, tmp_path: Path) -> None:
    assert trained(strategy, workers, tmp_path / "whole") == []
    faults = trained(strategy, workers, tmp_path / "run", range(workers))
    assert [fault.data["rank"] for fault in faults] == list(range(workers))
    assert all(fault.data["action"].startswith("replaced in ") for fault in faults), faults
    found, expected = saved(tmp_path / "run"), saved(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
