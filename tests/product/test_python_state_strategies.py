"""State that is no tensor, under the strategies of which a rank holds a part of the network, or trains by itself: it is
carried with the undisturbed bits, or named and refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion

pytestmark = pytest.mark.filterwarnings(r"ignore:4 workers x \d+ threads")  # replicas of parts, on any machine
STEPS = 30
OFTEN = apportion.Policy(checkpoint_every="10 steps")


class Counting(nn.Module):
    """A layer that counts its calls, between two layers that are cut."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x / (1 + 0.02 * self.calls)


class CountingLoss(nn.Module):
    calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) / (1 + 0.02 * self.calls)


class Noisy(TensorDataset):
    """Rows with noise of a private generator."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.generator = np.random.default_rng(5)

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index] * (0.6 + 0.4 * self.generator.random()), self.tensors[1][index]


class Asked(torch.optim.lr_scheduler.LRScheduler):
    """A schedule with an attribute of Python's."""

    asked = 0

    def get_lr(self) -> list[float]:
        self.asked += 1
        return [base / (1 + 0.05 * self.asked) for base in self.base_lrs]


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), *between, nn.Tanh(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutions(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *between, nn.Tanh(), nn.Flatten(), nn.Linear(3 * 12 * 4, 3))


class Recurrent(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.lstm, self.between = nn.LSTM(4, 6, num_layers=2, batch_first=True), nn.Sequential(*between)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.lstm(x)[0][:, -1]))


NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "conv_parallel": (convolutions, (1, 12, 4)),
    "hybrid_parallel": (convolutions, (1, 12, 4)),
    "wavefront_parallel": (Recurrent, (12, 4)),
    "": (mlp, (12,)),
}
STRATEGIES = [
    "conv_parallel",
    "wavefront_parallel",
    "hybrid_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "pipeline_parallel(microbatches=1)",
    "fully_sharded",
    "map_reduce",
    "data_parallel(of=pipeline_parallel(microbatches=1), replicas=2)",
    "data_parallel(of=tensor_parallel(), replicas=2)",
]
CUT = "pipeline_parallel"
"""The strategy that cuts its batches into micro-batches."""
APART = ["parameter_server", "local_sgd(every=2)"]
KINDS = ["module", "loss", "data", "schedule"]


def workload(kind: str, strategy: str) -> apportion.Workload:
    network, shape = NETWORKS.get(strategy, NETWORKS[""])
    draws = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(120, *shape, generator=draws), torch.randint(3, (120,), generator=draws)
    inner = CountingLoss() if kind == "loss" else nn.functional.cross_entropy

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        Path(os.environ["PIDS"], f"{os.environ.get('RANK')}.{os.getpid()}").touch()
        time.sleep(0.005)  # so that a worker can be killed, and a run left, before its end
        return inner(outputs, targets)

    return apportion.Workload(
        model=lambda: network(Counting()) if kind == "module" else network(),
        data=lambda: (Noisy if kind == "data" else TensorDataset)(rows, labels),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        schedule=(lambda optimizer, steps: Asked(optimizer)) if kind == "schedule" else None,
        batch_size=12,
        steps=STEPS,
        precision="float64",
    )


@pytest.fixture(autouse=True)
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path / "pids"


class Outcome:
    """What became of a run: its weights, the causes of its faults, and the error that ended it."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] | None = None
        self.heard: list[str] = []
        self.refused = ""

    def named(self, *words: str) -> bool:
        return any(word in said for said in (*self.heard, self.refused) for word in words)


WORDS = {"module": ("calls", "Counting"), "loss": ("calls",), "data": ("data.generator",), "schedule": ("asked",)}


def run(kind: str, strategy: str, workers: int, run_dir: Path, *, do: str = "", resume: bool = False) -> Outcome:
    """``do``: "kill" a worker in the middle, or "leave" the run at a checkpoint."""
    work, outcome, launcher = workload(kind, strategy), Outcome(), apportion.local(workers)
    how: dict[str, Any] = {"policy": OFTEN, "check": False, "resume": resume}
    try:
        for event in apportion.run(work, strategy, launcher=launcher, run_dir=run_dir, **how):
            if event.kind == "fault":
                outcome.heard.append(event.data["cause"])
            if do == "kill" and event.kind == "step" and event.step >= 12:
                files = [file for rank in (1, 0) for file in Path(os.environ["PIDS"]).glob(f"{rank}.*")]
                newest = max(files, key=lambda file: (file.name.startswith("1."), file.stat().st_mtime_ns))
                os.kill(int(newest.suffix[1:]), signal.SIGKILL)
                do = ""
            if do == "leave" and event.kind == "checkpoint":
                break
    except (ValueError, apportion.errors.ApportionError) as error:
        outcome.refused = str(error)
        return outcome
    assert do != "kill", "no worker was killed"
    outcome.weights = apportion.load(run_dir, model=work.model).state_dict()
    return outcome


def workers_of(strategy: str) -> int:
    return 4 if "(of=" in strategy else 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_of_a_part_is_carried_or_named(kind: str, strategy: str, tmp_path: Path, furthest: Any) -> None:
    workers, words = workers_of(strategy), WORDS[kind]
    calm = run(kind, strategy, workers, tmp_path / "calm")
    if calm.weights is None:
        assert calm.named(*words), calm.refused
        return
    left = run(kind, strategy, workers, tmp_path / "left", do="leave")
    resumed = run(kind, strategy, workers, tmp_path / "left", resume=True)
    if resumed.weights is None:
        assert left.named(*words), left.heard
        assert resumed.named(*words), resumed.refused
    else:
        assert furthest(calm.weights, resumed.weights) == 0.0
    killed = run(kind, strategy, workers, tmp_path / "killed", do="kill")
    if strategy == "fully_sharded":  # a lost worker stops its run, which goes on from the last checkpoint
        assert killed.weights is None
        assert killed.named("was killed by SIGKILL"), killed.refused
        killed = run(kind, strategy, workers, tmp_path / "killed", resume=True)
    if killed.weights is None:
        assert killed.named(*words), killed.refused
    else:
        assert furthest(calm.weights, killed.weights) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if "(of=" not in s])
def test_state_of_a_part_goes_on_on_another_number_of_workers(
    kind: str, strategy: str, tmp_path: Path, furthest: Any
) -> None:
    # The loss is called once for each micro-batch, so that one that counts its calls is compared with the same
    # strategy undisturbed; a proof refuses it.
    of_its_own = NETWORKS.get(strategy, NETWORKS[""]) is not NETWORKS[""] or (kind, strategy) == ("loss", CUT)
    calm = run(kind, strategy if of_its_own else "single_device", 1, tmp_path / "calm")
    left = run(kind, strategy, 2, tmp_path / "left", do="leave")
    if left.weights is None:
        assert left.named(*WORDS[kind]), left.refused
        return
    resumed = run(kind, strategy, 1, tmp_path / "left", resume=True)
    if resumed.weights is None:
        assert resumed.named(*WORDS[kind]), resumed.refused
    else:
        assert calm.weights is not None
        assert furthest(calm.weights, resumed.weights) < 1e-9


@pytest.mark.slow
def test_a_loss_that_counts_is_refused_under_microbatches(tmp_path: Path) -> None:
    work = workload("loss", CUT)
    with pytest.raises(apportion.errors.ApportionError, match="pipeline_parallel"):
        apportion.train(work, CUT, launcher=apportion.local(2), run_dir=tmp_path / "proved")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", APART)
def test_what_workers_keep_apart_is_carried_or_named(kind: str, strategy: str, tmp_path: Path) -> None:
    left = run(kind, strategy, 2, tmp_path / "left", do="leave")
    resumed = run(kind, strategy, 2, tmp_path / "left", resume=True)
    if kind == "schedule":  # each counts the same updates
        assert resumed.weights is not None or resumed.named(*WORDS[kind])
    else:
        assert left.named(*WORDS[kind]), left.heard
        assert resumed.named(*WORDS[kind]), resumed.refused
