"""The strategy that ranks take which are running already, where none is given."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import priced
import pytest
from commands import finish, places, start

from apportion.planner.build import make
from apportion.planner.candidate import Measurement, Priced
from apportion.planner.launched_choice import described_choice
from apportion.planner.plan import Plan
from apportion.planner.search import search

RUN = """
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
    model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)),
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=16,
    steps=8,
)
rank, told = os.environ["RANK"], []
try:
    for event in apportion.run(workload, launcher=apportion.env(device="cpu"), run_dir="chosen", check=False):
        if event.kind in ("plan", "start", "end"):
            told.append([event.kind, event.step, event.data.get("strategy"), event.data.get("why")])
except ValueError as error:
    told = str(error)
with open(f"told-{rank}.json", "w") as file:
    json.dump(told, file)
"""


def planned(rows: int = 64) -> Plan:
    """For two ranks on two hosts, or one of them alone."""
    cluster, profile = priced.cpus(hosts=2, cores=1), priced.profile(200_000, 200_000, rows=rows)
    found = [p for workers in (2, 1) for p in search(profile, cluster, workers=workers)]
    return make(found, profile, cluster)


def tried(plan: Plan, strategy: str, seconds: float) -> Plan:
    """The plan after steps of this strategy on both ranks took so long."""

    def taken(p: Priced) -> Priced:
        on_both = str(p.strategy) == strategy and p.layout.ranks == 2
        took = Measurement(step_seconds=seconds, low=seconds, high=seconds, steps=10)
        return replace(p, tried=took) if on_both else p

    return replace(plan, found=tuple(taken(p) for p in plan.found))


def test_what_was_tried_on_all_ranks_is_taken_before_what_was_predicted() -> None:
    told = described_choice(tried(planned(), "fully_sharded", 0.5), 2, "env")
    assert told["strategy"] == "fully_sharded"
    assert told["launcher"] == "env"
    assert told["why"].startswith("the fastest on all 2 ranks, 500 ms a step as measured")
    (row,) = [r for r in told["candidates"] if r["strategy"] == "fully_sharded"]
    assert row["step_seconds"] == 0.5
    assert row["launcher"] == "env"


def test_one_process_is_not_taken_and_named_where_it_would_be_faster() -> None:
    told = described_choice(tried(planned(), "data_parallel", 100.0), 2, "env")
    assert told["strategy"] == "data_parallel"
    assert "one process would be faster" in told["why"]
    assert told["candidates"][-1]["strategy"].startswith("single_device")
    assert told["candidates"][-1]["launcher"].startswith("local(workers=1")


def test_where_nothing_exact_runs_on_all_ranks_the_reasons_are_told() -> None:
    plan = planned()
    refused = [replace(p, cost=None, refusal="no") if p.layout.ranks == 2 else p for p in plan.found]
    told = described_choice(replace(plan, found=tuple(refused)), 2, "env")
    assert told["strategy"] is None
    assert "data_parallel: no" in told["why"]


def run_on(folder: Path, *hosts: int) -> list[object]:
    """What each rank was told of a run without a strategy."""
    (folder / "run.py").write_text(textwrap.dedent(RUN))
    finish([start([sys.executable, "run.py"], **place) for place in places(*hosts)])
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(sum(hosts))]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.processes
def test_ranks_choose_together_and_all_of_them_train_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = run_on(tmp_path, 1, 1)
    assert isinstance(first, list)
    assert [event[0] for event in first] == ["plan", "start", "end"]
    assert first[0][2] == first[1][2], "what the plan says is trained"
    assert first[0][3].startswith("the fastest on all 2 ranks")
    assert [event[:2] for event in second] == [["end", 8]]  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "chosen" / "run.json").read_text())["strategy"] == first[0][2]


@pytest.mark.processes
@pytest.mark.thorough
def test_ranks_that_lie_unevenly_are_told_to_name_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = run_on(tmp_path, 2, 1)
    assert told[0] == told[1] == told[2]
    assert str(told[0]).startswith("3 ranks on 2 hosts, 2 and 1 of them: a plan is for as many on every host")
