"""A proof that does not fit its time shows less, and says so; it never shows nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import apportion


class Slow(nn.Linear):
    """A layer that takes more than a second."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1.4)
        return super().forward(x)


def with_the_next(samples: list[Any]) -> Any:
    """Mixes each row with the next of its batch, which another rank may have."""
    x, y = default_collate(samples)
    return 0.8 * x + 0.2 * x.roll(1, 0), 0.8 * y + 0.2 * y.roll(1, 0)


def centred(samples: list[Any]) -> Any:
    """Takes the mean of the batch from its rows."""
    x, y = default_collate(samples)
    return x - x.mean(0), y


def workload(**changes: Any) -> apportion.Workload:
    x = torch.randn(200, 10, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(Slow(10, 16), nn.Tanh(), nn.Linear(16, 3)),
        "data": lambda: TensorDataset(x, x[:, :3].softmax(1)),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "batch_size": 20,
        "steps": 2,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("collate", [with_the_next, centred])
def test_a_mistake_in_the_one_step_that_is_always_made_ends_the_run(collate: Any, trained: Any) -> None:
    with pytest.raises(apportion.Disproved, match="does not train the same network as one device"):
        trained(workload(collate=collate), "data_parallel", 2)


@pytest.mark.slow
def test_what_was_left_out_for_want_of_time_is_in_the_sentence(tmp_path: Any) -> None:
    events = apportion.run(workload(), "data_parallel", launcher=apportion.local(workers=2), run_dir=tmp_path / "run")
    proof = next(e.data["proof"] for e in events if e.kind == "start")
    assert proof["verdict"] == "equal"
    assert "for want of time" in proof["sentence"]
    assert "rows per rank" in proof["sentence"]
