"""The evaluation is tried on one batch before the training, says which metric fails on what, and leaves no trace."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from ranks import by_value
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Workload
from apportion.cli.app import app
from apportion.comm.group import Alone
from apportion.comm.world import World
from apportion.core.data.source import BatchSource
from apportion.reporting.journal import read_events
from apportion.runtime.worker.evaluation import try_evaluation
from apportion.strategies.single_device import SingleDevice

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def _whole() -> Iterator[None]:
    with by_value(sys.modules[__name__]):
        yield


def points() -> TensorDataset:
    x = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(61) % 3)


class Counting(nn.Module):
    """Counts its calls in a buffer, whatever its mode, and draws by three generators where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.training:
            x = x + 0.0 * (torch.rand(1) + random.random() + float(np.random.rand()))
        return self.layer(x)


class Largest:
    """A metric over the whole set; ``fails`` says where."""

    fails = ""

    def __init__(self) -> None:
        if self.fails == "init":
            raise KeyError("no such setting")
        self.seen: list[float] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if self.fails == "update":
            raise TypeError("an update of nothing")
        self.seen.append(float(outputs.max()))

    def compute(self) -> float:
        if self.fails == "compute":
            raise AttributeError("no attribute of that name")
        if self.fails == "one batch" and len(self.seen) < 2:
            raise ValueError("a single class is there")
        return max(self.seen)


def failing(where: str) -> type[Largest]:
    return type("Largest", (Largest,), {"fails": where})


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(2) == targets).double().mean()


def workload(metrics: dict[str, Any], **options: Any) -> Workload:
    given = {
        "model": lambda: nn.Linear(4, 3),
        "data": points,
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "batch_size": 8,
        "steps": 5,
        "evaluation": Evaluation(data=points, metrics=metrics),
    }
    return Workload(**{**given, **options})


def train(work: Workload, run_dir: Path, strategy: str = "data_parallel", workers: int = 2) -> Any:
    launcher = apportion.local(workers=workers, threads=1, device="cpu")
    return apportion.train(work, strategy, launcher=launcher, run_dir=run_dir)


@pytest.mark.parametrize("strategy", ["data_parallel", "layer_placement", "parameter_server"])
def test_a_metric_that_raises_is_named_with_what_it_was_given_before_the_training(
    tmp_path: Path, strategy: str
) -> None:
    model = lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))  # noqa: E731
    work = workload({"fine": apportion.accuracy, "share": wrong}, model=model)
    with pytest.raises(ValueError, match="the metric 'share' cannot be computed") as raised:
        train(work, tmp_path / "run", strategy)
    told = str(raised.value)
    rows = 4 if strategy == "data_parallel" else 8
    assert f"of outputs ({rows}, 3) float32 and targets ({rows},) int64: IndexError" in told
    assert "test_evaluation_trial.py" in told
    assert "in wrong" in told
    kinds = (
        {event.kind for event in read_events(tmp_path / "run")} if (tmp_path / "run/events.jsonl").exists() else set()
    )
    assert not kinds & {"start", "step", "end"}


def undefined(outputs: Tensor, targets: Tensor) -> float:
    return math.nan


def test_a_nan_in_the_metric_that_chooses_the_best_is_reported_once(tmp_path: Path) -> None:
    evaluation = Evaluation(data=points, metrics={"share": undefined}, every=0.25, best="max share")
    train(workload({}, evaluation=evaluation), tmp_path / "run")
    events = list(read_events(tmp_path / "run"))
    assert sum(event.kind == "evaluation" for event in events) > 1
    (fault,) = [event for event in events if event.kind == "fault"]
    assert fault.data["action"] == "goes on"
    assert "the metric 'share' is NaN at step 2" in fault.data["cause"]


@pytest.mark.parametrize("where", ["init", "update", "compute"])
def test_a_metric_object_is_tried_to_its_end(tmp_path: Path, where: str) -> None:
    with pytest.raises(ValueError, match="the metric 'largest' cannot be computed"):
        train(workload({"largest": failing(where)}), tmp_path / "run")


def test_a_metric_that_needs_more_than_one_batch_is_not_refused(tmp_path: Path) -> None:
    end = train(workload({"largest": failing("one batch")}), tmp_path / "run")
    assert end.data["reason"] == "finished"
    with pytest.raises(ValueError, match="a single class"):  # where one batch is all there is
        train(replace(workload({"largest": failing("one batch")}), batch_size=61), tmp_path / "whole")


def test_it_leaves_no_trace() -> None:
    work = workload({"accuracy": apportion.accuracy, "largest": Largest}, model=Counting)
    step = SingleDevice().build(work, World.from_env(device="cpu"))
    source = BatchSource.of_evaluation(work, device=step.device)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), step.model.calls.item()
    assert work.evaluation is not None
    try_evaluation(step, work.evaluation, source, Alone())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), step.model.calls.item()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert step.done == 0
    assert step.model.training
    step.close()


def test_a_run_has_the_bits_that_it_has_without_an_evaluation(tmp_path: Path) -> None:
    def losses(work: Workload, name: str) -> list[float]:
        train(work, tmp_path / name)
        return [v for e in read_events(tmp_path / name) if e.kind == "step" for v in e.data["values"]["loss"]]

    work = workload({"accuracy": apportion.accuracy}, model=lambda: nn.Sequential(Counting(), nn.Dropout(0.3)))
    assert losses(work, "with") == losses(replace(work, evaluation=None), "without")


def test_the_exit_status_is_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nimport apportion\n"
        "data = lambda: TensorDataset(torch.ones(16, 4), torch.arange(16) % 3)\n"
        "workload = apportion.Workload(model=lambda: nn.Linear(4, 3), data=data, loss=nn.functional.cross_entropy,\n"
        "    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4,\n"
        "    evaluation=apportion.Evaluation(data=data, metrics={'share': lambda outputs, targets: outputs.no_such}))\n"
    )
    command = ["train", f"{tmp_path}/mine.py:workload", "--strategy", "single_device", "--run-dir", str(tmp_path / "r")]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 2, told.output
    assert "the metric 'share' cannot be computed" in told.output
