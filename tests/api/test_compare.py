"""Strategies side by side: what is counted."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from ranks import by_value
from torch.utils.data import TensorDataset

import apportion
from apportion.api import compare as verb
from apportion.api.compare import ComparedRow
from apportion.cost_model.cost import Cost

pytestmark = pytest.mark.processes


def whole_batches() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(256, 10, generator=generator), torch.arange(256) % 3)


def compared(strategy: str) -> ComparedRow:
    """On two workers; one device is always beside it."""
    with by_value(networks), by_value(sys.modules[__name__]):
        workload = replace(networks.cases["mlp"](64), data=whole_batches)
        rows = apportion.compare(workload, [strategy], workers=2, steps=10, predict=False)
    return next(row for row in rows if row.strategy != "single_device")


@pytest.mark.parametrize(
    ("strategy", "batches"), [("data_parallel", 1), ("local_sgd", 2), ("parameter_server", 2), ("hogwild", 2)]
)
def test_the_batches_of_all_workers_count(strategy: str, batches: int) -> None:
    """Together they make one; each on its own way, one each."""
    row = compared(strategy)
    assert row.examples_per_second * row.step_seconds == pytest.approx(batches * 64)
    assert row.workers == 2
    assert row.p90_seconds >= row.step_seconds > 0


@pytest.mark.filterwarnings("ignore:.*they take turns")
def test_a_server_makes_no_steps_and_is_measured_all_the_same() -> None:
    row = compared("parameter_server(servers=1)")
    assert row.examples_per_second * row.step_seconds == pytest.approx(2 * 64)


def test_what_was_predicted_stands_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def prices(workload: Any, candidates: Any, seconds: float) -> list[Cost | None]:
        asked.extend(str(c.strategy) for c in candidates)
        return [Cost(terms={"computing": 1e-3}, examples=64), None]

    monkeypatch.setattr(verb, "prices", prices)
    with by_value(networks), by_value(sys.modules[__name__]):
        workload = replace(networks.cases["mlp"](64), data=whole_batches)
        rows = {row.strategy: row for row in apportion.compare(workload, ["data_parallel"], workers=2, steps=5)}
    assert asked == ["single_device", "data_parallel"], "once, before any step is made"
    alone, parallel = rows["single_device"], rows["data_parallel"]
    assert alone.predicted_seconds == 1e-3
    assert alone.error == pytest.approx(alone.step_seconds / 1e-3 - 1)
    assert (parallel.predicted_seconds, parallel.error) == (None, None)
    assert parallel.to_json()["error"] is None
