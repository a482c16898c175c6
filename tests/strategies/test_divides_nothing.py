"""A strategy that would divide nothing of a network is refused by every verb: nobody is to believe that a run
is divided where every worker computes all of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ranks import by_value
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.cli.app import app
from apportion.core.strategy import Strategy
from apportion.core.value import names, parse
from apportion.cost_model.cluster import Cluster
from apportion.planner.search import places_of, search
from apportion.profiler.measure_cluster import measure
from apportion.profiler.measure_workload import profile
from apportion.runtime.launch.local import Local

pytestmark = pytest.mark.processes

CUT = [s for s in names("apportion.strategies") if parse(s, "apportion.strategies").splits]


class Scaled(nn.Module):
    """One layer, which looks like none that could be sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class Opaque(Scaled):
    """No tracer follows it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.sum() < 1e9 else x


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 3, generator=draws), torch.randint(3, (16,), generator=draws))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def workload(model: type[nn.Module]) -> Workload:
    return Workload(model=model, data=data, loss=F.cross_entropy, optimizer=sgd, batch_size=4, steps=2)


scaled, opaque = workload(Scaled), workload(Opaque)
LAUNCHER = Local(workers=2, threads=1, device="cpu")
VERBS: dict[str, Callable[[Workload, str, Path], Any]] = {
    "train": lambda w, s, where: apportion.train(w, s, launcher=LAUNCHER, run_dir=where / "run"),
    "check": lambda w, s, where: apportion.check(w, s, launcher=LAUNCHER, steps=1),
    "compare": lambda w, s, where: apportion.compare(w, [s], launcher=LAUNCHER, steps=1, predict=False),
}


def is_told(strategy: str, text: str) -> None:
    """What was looked for, by whom, and what to use."""
    assert strategy in text
    assert "use " in text.partition(": ")[2]
    assert "data_parallel" in text


@pytest.mark.parametrize("strategy", CUT)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("model", ["scaled", "opaque"])
def test_every_function_refuses_it(strategy: str, verb: str, model: str, tmp_path: Path) -> None:
    with by_value(sys.modules[__name__]), pytest.raises(ValueError, match="use ") as caught:
        VERBS[verb](globals()[model], strategy, tmp_path)
    is_told(strategy, str(caught.value))


@pytest.mark.parametrize("strategy", CUT)
@pytest.mark.parametrize("verb", VERBS)
def test_every_command_refuses_it_with_status_2(
    strategy: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # What a step would take is foretold first, which is not what is asked here.
    monkeypatch.setattr(sys.modules["apportion.api.compare"], "PROFILE_SECONDS", 0.5)
    found = CliRunner().invoke(app, [verb, f"{__file__}:scaled", "--strategy", strategy, "--workers", "2"])
    assert found.exit_code == 2, found.output
    is_told(strategy, " ".join(found.output.split()))


@pytest.mark.parametrize("model", ["scaled", "opaque"])
@pytest.mark.thorough
def test_a_plan_has_a_reason_and_no_price_for_it(model: str) -> None:
    machine: Cluster = measure()
    with by_value(sys.modules[__name__]):
        timed = profile(globals()[model], machine, places_of(machine, 2))
    for strategy in CUT:
        value: Strategy = parse(strategy, "apportion.strategies")
        (found,) = search(timed, machine, workers=2, strategies=[value])
        assert found.cost is None, strategy
        is_told(strategy, found.refusal)
