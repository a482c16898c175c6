"""What train returns, what an event holds, and a run that is begun or gone on with, whichever there is."""

from __future__ import annotations

import copy
import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from commands import finish, free_port, start
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def rows() -> TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


WORKLOAD = apportion.Workload(
    model=lambda: nn.Linear(4, 2),
    data=rows,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=16,
    steps=4,
    evaluation=apportion.Evaluation(data=rows),
)


def test_what_an_event_holds_are_its_attributes() -> None:
    event = apportion.Event(kind="step", step=3, epoch=0.5, seconds=1.0, data={"learning_rate": 0.1, "seconds": 9.0})
    assert event.learning_rate == 0.1
    assert event.seconds == 1.0, "of the event itself"
    with pytest.raises(AttributeError, match="an event of kind 'step' has no 'metrics': it has learning_rate, seconds"):
        _ = event.metrics
    assert not hasattr(event, "run_dir")
    for other in (copy.deepcopy(event), pickle.loads(pickle.dumps(event))):
        assert other == event
        assert other.learning_rate == 0.1


@pytest.mark.processes
def test_train_returns_what_the_run_came_to(tmp_path: Path) -> None:
    result = apportion.train(WORKLOAD, "single_device", run_dir=tmp_path / "run")
    assert isinstance(result, apportion.Result)
    assert (result.kind, result.step, result.reason) == ("end", 4, "finished")
    assert result.run_dir == tmp_path / "run"
    assert set(result.metrics) == {"accuracy"}
    assert 0.0 <= result.metrics["accuracy"] <= 1.0
    assert result.examples_per_second > 0


@pytest.mark.processes
def test_auto_starts_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    first = apportion.train(WORKLOAD, "single_device", run_dir=tmp_path / "run", resume="auto")
    assert first.step == 4
    events = list(apportion.run(WORKLOAD, run_dir=tmp_path / "run", resume="auto", steps=6))
    began = next(event for event in events if event.kind == "start")
    assert (began.strategy, began.first_step, began.resumed) == ("single_device", 4, True)
    assert events[-1].step == 6


def test_what_resume_may_be_is_told() -> None:
    with pytest.raises(ValueError, match="resume='later' must be True, False or \"auto\""):
        apportion.run(WORKLOAD, "single_device", run_dir="run", resume="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume='auto' needs run_dir"):
        apportion.run(WORKLOAD, "single_device", resume="auto")


SCRIPT = """
import os
import sys

import apportion
from test_result import WORKLOAD

folder = "run" if os.environ["RANK"] == "0" else "of-another-disk"
options = {"launcher": apportion.env(device="cpu"), "run_dir": folder, "resume": "auto", "check": False}
assert apportion.train(WORKLOAD, "data_parallel", **options).step == 4
assert apportion.train(WORKLOAD, "data_parallel", steps=6, **options).step == 6
"""


@pytest.mark.processes
@pytest.mark.thorough
def test_ranks_that_are_running_go_on_where_rank_0_has_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    at = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    at["PYTHONPATH"] = str(Path(__file__).parent) + ":" + ":".join(path for path in sys.path if "helpers" in path)
    finish([start([sys.executable, "script.py"], **at, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")])
    assert (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "of-another-disk").exists()
