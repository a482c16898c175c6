"""A loss that is not finite ends the run, with its step, the layer where it begins, and the last finite checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ranks import by_value
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Policy, Workload
from apportion.cli.app import app
from apportion.core.event import Event
from apportion.errors import NotFinite
from apportion.reporting.journal import read_events
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.worker.nonfinite_loss import FirstNotFinite

pytestmark = pytest.mark.processes

ROWS, BATCH, BAD = 40, 8, 27
"""Example 27 is the one that cannot be computed: of an epoch in order, it is in step 4."""


@pytest.fixture(autouse=True, scope="module")
def _whole() -> Iterator[None]:
    with by_value(sys.modules[__name__]):
        yield


class Logarithm(nn.Module):
    """Of a value that is positive, but for one example."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Between(nn.Module):
    """Divides in its own forward pass, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / x[:, :1].clamp(min=0.0))


class Root(nn.Module):
    """Finite everywhere, but its gradient is not at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x).abs().sqrt())


def points(zeros: bool = False) -> TensorDataset:
    x = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    x[BAD] = 0.0 if zeros else -1.0
    return TensorDataset(x, torch.arange(ROWS) % 3)


def logarithms() -> nn.Module:
    return nn.Sequential(nn.Identity(), Logarithm(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def workload(model: Any = logarithms, **options: Any) -> Workload:
    given = {
        "model": model,
        "data": points,
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "batch_size": BATCH,
        "order": "sequential",
        "epochs": 2,
    }
    return Workload(**{**given, **options})


def train(work: Workload, strategy: Any, run_dir: Path, workers: int = 1, on_nan: str = "stop") -> Event:
    launcher = apportion.local(workers=workers, threads=1, device="cpu")
    policy = Policy(checkpoint_every="1 steps", on_nan=on_nan)  # type: ignore[arg-type]
    return apportion.train(work, strategy, launcher=launcher, run_dir=run_dir, policy=policy)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("single_device", 1), ("data_parallel", 2), ("map_reduce", 2), ("local_sgd", 2), ("hogwild", 1),
     ("parameter_server", 1)],
)  # fmt: skip
def test_it_ends_at_its_step_and_names_the_first_layer(tmp_path: Path, strategy: str, workers: int) -> None:
    with pytest.raises(NotFinite) as raised:
        train(workload(), strategy, tmp_path / "run", workers)
    told = str(raised.value)
    assert "loss is nan at step 4" in told or strategy == "local_sgd"  # whose replicas take other batches
    assert "the output of 1 (Logarithm) is the first that is not finite" in told
    assert "clip_grad_norm" in told
    kept = RunDirectory(tmp_path / "run")
    assert all(t.isfinite().all() for number in kept.steps() for t in kept.restore(number).model.values())
    events = read_events(tmp_path / "run")
    assert "end" not in {event.kind for event in events}
    assert events[-1].data["action"] == "stops"


def test_the_last_finite_checkpoint_is_kept_and_named(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="the last finite checkpoint, step 3, is kept"):
        train(workload(), "single_device", tmp_path / "run")
    assert RunDirectory(tmp_path / "run").steps()[-1] == 3


@pytest.mark.parametrize("strategy", ["pipeline_parallel", "layer_placement"])
def test_a_network_in_parts_ends_too(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(NotFinite, match="loss is nan at step 4"):
        train(workload(), strategy, tmp_path / "run", 2)


def test_a_gradient_that_is_not_finite_is_told_by_the_weights_that_it_spoilt(tmp_path: Path) -> None:
    work = workload(Root, data=lambda: points(zeros=True))
    with pytest.raises(
        NotFinite, match=r"before\.weight (is not finite since the update before|holds a NaN)"
    ) as raised:
        train(work, "single_device", tmp_path / "run")
    assert "step 3, is kept" in str(raised.value)


def test_a_last_update_that_spoils_the_weights_is_no_finished_run(tmp_path: Path) -> None:
    work = workload(Root, data=lambda: points(zeros=True), steps=4)
    with pytest.raises(NotFinite, match="holds a NaN after step 4"):
        train(work, "single_device", tmp_path / "run")


def test_with_warn_it_goes_on_tells_once_and_keeps_the_finite_checkpoint(tmp_path: Path) -> None:
    end = train(workload(), "data_parallel", tmp_path / "run", 2, on_nan="warn")
    assert end.data["reason"] == "finished"
    faults = [event.data for event in read_events(tmp_path / "run") if event.kind == "fault"]
    assert [fault["action"] for fault in faults] == ["goes on"] * len(faults)
    assert any("(Logarithm)" in fault["cause"] for fault in faults)
    assert 1 <= len(faults) <= 2  # of each rank
    assert RunDirectory(tmp_path / "run").steps()[-1] == 3


def test_with_ignore_nothing_is_looked_at(tmp_path: Path) -> None:
    end = train(workload(), "single_device", tmp_path / "run", on_nan="ignore")
    assert end.data["reason"] == "finished"
    assert not [event for event in read_events(tmp_path / "run") if event.kind == "fault"]
    assert RunDirectory(tmp_path / "run").steps()[-1] == 10


def test_a_buffer_that_is_nan_from_the_beginning_is_the_models_own_affair(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 3))
        made.register_buffer("never_seen", torch.full((2,), float("nan")))
        made.register_buffer("mask", torch.full((2,), float("-inf")))
        return made

    assert train(workload(model, steps=3), "data_parallel", tmp_path / "run", 2).data["reason"] == "finished"
    assert RunDirectory(tmp_path / "run").steps()[-1] == 3


@pytest.mark.usefixtures("reports")
def test_the_exit_status_is_1_and_nothing_says_finished(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r})\n"
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nimport apportion\n"
        "workload = apportion.Workload(\n"
        "    model=lambda: nn.Linear(4, 3),\n"
        "    data=lambda: TensorDataset(torch.full((16, 4), 1e30), torch.arange(16) % 3),\n"
        "    loss=nn.functional.cross_entropy,\n"
        "    optimizer=lambda p: torch.optim.SGD(p, lr=1e30),\n"
        "    batch_size=4,\n"
        ")\n"
    )
    run = tmp_path / "run"
    command = ["train", f"{tmp_path}/mine.py:workload", "--strategy", "single_device", "--run-dir", str(run)]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1, told.output
    assert "at step 2" in told.output
    assert "inished" not in told.output
    assert "Not finished" in (run / "report.html").read_text()


def test_what_a_module_computes_between_its_layers_is_named() -> None:
    model = Between()
    first = FirstNotFinite(model)
    with torch.no_grad():
        model(points().tensors[0])
    assert first.found is not None
    assert first.found.startswith("what Between computes before it calls second (Linear)")


def test_inputs_that_are_not_finite_are_no_layers_fault() -> None:
    model = logarithms()
    first = FirstNotFinite(model)
    with torch.no_grad():
        model(torch.full((1, 4), float("inf")))
    assert first.found == "the inputs of the batch are not finite"


def test_the_policy_says_what_it_takes() -> None:
    with pytest.raises(ValueError, match="on_nan='halt' must be \"stop\""):
        Policy(on_nan="halt")  # type: ignore[arg-type]
    assert str(replace(Policy(), on_nan="warn")) == "policy(on_nan='warn')"
