"""Where a pipeline is cut is measured once: a run that goes on has the same stages, and so the same bits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion

pytestmark = pytest.mark.filterwarnings("ignore:.*they take turns")
HEAVY = "TEST_PIPELINE_CUT_HEAVY"
"""An environment variable with the number of the layer that takes long on this machine, as if others ran on it."""


def weighed(number: int, x: Tensor) -> Tensor:
    """The same numbers, late where this layer is the heavy one."""
    if os.environ.get(HEAVY) == str(number):
        time.sleep(0.004)
    return x


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ArithmeticError("not a number")
        return self.drop(weighed(self.number, self.linear(x)).tanh())


class Guarded(nn.Module):
    """A network that no tracer follows into its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(i) for i in range(6)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.library.define("apportion_test_cut::heavy", "(Tensor x, int number) -> Tensor")


@torch.library.impl("apportion_test_cut::heavy", "CompositeImplicitAutograd")
def heavy(x: Tensor, number: int) -> Tensor:
    return weighed(number, x) * 1.0


class Shared(nn.Module):
    """A network that calls its layers over and over, and draws between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(6):
            x = self.first(x) if number % 2 else self.second(x)
            x = self.drop(torch.ops.apportion_test_cut.heavy(x, number).tanh())
        return self.head(x)  # type: ignore[no-any-return]


def rows() -> TensorDataset:
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def work(model: Callable[[], nn.Module]) -> apportion.Workload:
    return apportion.Workload(
        model=model,
        data=rows,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch_size=16,
        epochs=2,
    )


def stages(folder: Path) -> list[str]:
    """The layers that the stages of the newest checkpoint begin with."""
    return json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())["cuts"]["before"]  # type: ignore[no-any-return]


def left(workload: apportion.Workload, strategy: str, folder: Path, workers: int = 2) -> None:
    """Train, and leave the run after a few steps."""
    for event in apportion.run(
        workload, strategy, launcher=apportion.local(workers=workers), run_dir=folder, check=False
    ):
        if event.kind == "step" and event.step >= 5:
            break


def ended(workload: apportion.Workload, strategy: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    given = {"launcher": apportion.local(workers=2), "check": False, **options}
    apportion.train(workload, strategy, run_dir=folder, **given)
    return apportion.load(folder, model=workload.model).state_dict()


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Guarded, Shared])
def test_a_run_that_goes_on_has_the_stages_that_it_began_with(
    model: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEAVY, "0")
    whole = ended(work(model), "pipeline_parallel(microbatches=2)", tmp_path / "whole")
    left(work(model), "pipeline_parallel(microbatches=2)", tmp_path / "left")
    began = stages(tmp_path / "left")
    monkeypatch.setenv(HEAVY, "5")
    went_on = ended(work(model), "pipeline_parallel(microbatches=2)", tmp_path / "left", resume=True)
    assert stages(tmp_path / "left") == began == stages(tmp_path / "whole")
    assert json.loads((tmp_path / "left" / "run.json").read_text())["cuts"] == {"workers": 2, "before": began}
    assert all(torch.equal(whole[name], went_on[name]) for name in whole)


@pytest.mark.thorough
def test_replicas_of_a_pipeline_keep_their_stages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, four = "data_parallel(of=pipeline_parallel(microbatches=2), replicas=2)", apportion.local(workers=4)
    monkeypatch.setenv(HEAVY, "0")
    whole = ended(work(Guarded), strategy, tmp_path / "whole", launcher=four)
    left(work(Guarded), strategy, tmp_path / "left", workers=4)
    monkeypatch.setenv(HEAVY, "5")
    went_on = ended(work(Guarded), strategy, tmp_path / "left", launcher=four, resume=True)
    assert all(torch.equal(whole[name], went_on[name]) for name in whole)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Guarded, Shared])
def test_another_number_of_workers_is_cut_anew(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    left(work(model), "pipeline_parallel(microbatches=2)", tmp_path / "run")
    assert len(stages(tmp_path / "run")) == 1
    ended(
        work(model), "pipeline_parallel(microbatches=2)", tmp_path / "run",
        launcher=apportion.local(workers=3), resume=True,
    )  # fmt: skip
    assert len(stages(tmp_path / "run")) == 2


@pytest.mark.thorough
def test_cuts_that_the_user_names_win(tmp_path: Path) -> None:
    left(work(Guarded), "layer_placement", tmp_path / "run")
    named = next(name for name in ("layers.1", "layers.2") if name not in stages(tmp_path / "run"))
    ended(work(Guarded), f"layer_placement(cuts=('{named}',))", tmp_path / "run", resume=True)
    assert stages(tmp_path / "run") == [named]


class Renamed(nn.Module):
    """The network with its layers under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Layer(i) for i in range(6)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]


class Traced(nn.Module):
    """Another network, which a tracer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.middle(self.inner(x).tanh()).tanh())  # type: ignore[no-any-return]


@pytest.mark.thorough
@pytest.mark.parametrize(("began", "now"), [(Guarded, Renamed), (Shared, Traced), (Traced, Guarded)])
def test_a_network_that_has_changed_is_named_and_not_the_cut(began: Any, now: Any, tmp_path: Path) -> None:
    left(work(began), "pipeline_parallel(microbatches=2)", tmp_path / "run")
    with pytest.raises(Exception, match="the run was started with another workload: parameters") as raised:
        ended(work(now), "pipeline_parallel(microbatches=2)", tmp_path / "run", resume=True)
    assert "cuts=" not in str(raised.value)
