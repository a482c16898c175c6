"""Strategies side by side on ranks that are running already: every rank is told the same."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
from commands import finish, places, start

pytestmark = pytest.mark.processes

WORK = """
import dataclasses
import json
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion

torch.set_num_threads(1)


def examples():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


workload = apportion.Workload(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    batch_size=16,
    steps=12,
)
rank, options = os.environ["RANK"], {"steps": 6, "launcher": apportion.env()}
rows = apportion.compare(workload, ["data_parallel", "local_sgd"], path=f"saved-{rank}.json", **options)
told = {"rows": [row.to_json() for row in rows]}
try:
    apportion.compare(workload, ["data_parallel", "hogwild"], **options)
except ValueError as error:
    told["refused"] = str(error)
with open(f"told-{rank}.json", "w") as file:
    json.dump(told, file)
"""


def test_strategies_are_measured_on_the_ranks_there_are_and_all_return_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work.py").write_text(textwrap.dedent(WORK))
    monkeypatch.chdir(tmp_path)
    finish([start([sys.executable, "work.py"], **place) for place in places(2, 1)])
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(3)]
    assert told[0] == told[1] == told[2]
    rows = {row["strategy"]: row for row in told[0]["rows"]}
    assert set(rows) == {"single_device", "data_parallel", "local_sgd"}
    assert (rows["data_parallel"]["workers"], rows["data_parallel"]["launcher"]) == (3, "env")
    assert rows["single_device"]["workers"] == 1
    assert rows["single_device"]["times_one_device"] == 1.0
    for row in rows.values():
        assert row["steps"] == 6
        assert row["computing"] + row["waiting"] + row["communicating"] == pytest.approx(1.0)
    sent = rows["data_parallel"]
    assert sent["communicating"] > 0.0
    assert sent["examples_per_second"] * sent["step_seconds"] == pytest.approx(16.0), "together they make one batch"
    assert told[0]["refused"].startswith("hogwild keeps its weights in memory that all of its workers share")
    assert json.loads((tmp_path / "saved-0.json").read_text()) == told[0]["rows"]
    assert not (tmp_path / "saved-1.json").exists(), "rank 0 saves"
