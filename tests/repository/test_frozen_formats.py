"""What a run writes down is read by the next version: its files, the fields of its events, and the names of tensors.

Who changes one of these lists reads the old form for one release, and says so in the changelog.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from conftest import drawing
from ranks import by_value
from safetensors import safe_open
from torch import nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Event, Workload
from apportion.core.event import EventKind

EVENTS = {
    "plan": "candidates launcher remembered seconds strategy why",
    "proof": "remembered seconds sentence verdict",
    "start": (
        "batch_size count device examples first_step launcher parameters proof resumed steps steps_per_epoch strategy "
        "threads workers"
    ),
    "step": "examples_per_second learning_rate values",
    "speed": "computing examples_per_second loading rank updating waiting",
    "evaluation": "best final metrics",
    "checkpoint": "bytes path seconds",
    "end": "examples_per_second metrics reason resume run_dir",
}
"""The fields of the data of each kind of event."""
TENSORS = {
    "model.safetensors": {"0.bias", "0.weight", "1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var",
                          "1.weight", "2.bias", "2.weight"},
    "optimizer.safetensors": {f"{name}/{slot}" for name in ("0.bias", "0.weight", "1.bias", "1.weight", "2.bias",
                                                            "2.weight") for slot in ("exp_avg", "exp_avg_sq", "step")},
}  # fmt: skip


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """A run with everything in it that a run writes down."""
    workload = Workload(
        model=network,
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch_size=10,
        epochs=2,
        evaluation=Evaluation(data=data, every=1, best="max accuracy"),
    )
    path = tmp_path_factory.mktemp("frozen") / "run"
    with by_value(sys.modules[__name__]), drawing(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path.parent))  # a proof that an earlier run has made is no event
        events = list(
            apportion.run(
                workload, "data_parallel", launcher=apportion.local(workers=2, threads=1), run_dir=path, check=True
            )
        )
    return path, events


@pytest.mark.processes
@pytest.mark.thorough
def test_the_fields_of_events(run: tuple[Path, list[Event]]) -> None:
    fields = {event.kind: " ".join(sorted(event.data)) for event in run[1]}
    assert fields == {kind: EVENTS[kind] for kind in fields}
    assert set(fields) >= set(EVENTS) - {"plan"}
    assert set(get_args(EventKind)) == {*EVENTS, "rollouts", "drift", "fault"}
    assert [field.name for field in dataclasses.fields(Event)] == ["kind", "step", "epoch", "seconds", "data"]


@pytest.mark.processes
def test_the_lines_of_the_journal_are_the_events(run: tuple[Path, list[Event]]) -> None:
    lines = [json.loads(line) for line in (run[0] / "events.jsonl").read_text().splitlines()]
    events = [line for line in lines if "kind" in line]
    assert {tuple(sorted(line)) for line in events} == {("data", "epoch", "kind", "seconds", "step", "time")}


@pytest.mark.processes
def test_the_files_of_a_run(run: tuple[Path, list[Event]]) -> None:
    names = {path.name for path in run[0].iterdir()}
    assert {"run.json", "events.jsonl", "checkpoints", "report.html"} <= names
    links = {path.name: path for path in (run[0] / "checkpoints").iterdir() if path.is_symlink()}
    assert set(links) == {"latest", "best"}
    assert {path.name for path in links["latest"].iterdir()} == {*TENSORS, "state.json"}


@pytest.mark.processes
def test_what_run_json_holds(run: tuple[Path, list[Event]]) -> None:
    about = json.loads((run[0] / "run.json").read_text())
    assert {"address", "strategy", "launcher", "policy", "changes", "fingerprint", "proof", "cwd"} <= set(about)
    assert set(about["proof"]) == {"verdict", "sentence", "seconds", "remembered", "plain", "uncompared"}


@pytest.mark.processes
@pytest.mark.parametrize("file", TENSORS)
def test_the_names_of_the_tensors(file: str, run: tuple[Path, list[Event]]) -> None:
    with safe_open(run[0] / "checkpoints" / "latest" / file, "pt") as tensors:
        assert set(tensors.keys()) == TENSORS[file]
