"""Stages: cut anywhere, in micro-batches of any size and either order, they are the network of one device."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from ranks import by_value
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload, supervisor
from apportion.crew import Crew
from apportion.launch.local import Local
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategy import Strategy
from apportion.verbs import train as verb

EXACT = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:.*they take turns")


def prove(workload: Workload, strategy: Strategy, workers: int, steps: int = 5) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    (found,) = proof.rounds
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds
    assert not proof.by_design


def workload(model: Callable[[], nn.Module], shape: tuple[int, ...], batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(model, networks.tabular(batch_size, *shape), batch_size, **options)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)
    )  # fmt: skip


class Skipping(nn.Module):
    """Values that are used again one, two and three layers on, in place too; the input is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.layers[0](x))
        b = torch.tanh(self.layers[1](a))
        c = self.layers[2](b)
        c += a
        c = torch.relu_(c)
        d = self.layers[4](torch.sigmoid(self.layers[3](c))) * b + a
        return self.out(d + x.reshape(x.size(0), -1))


class Normalised(nn.Module):
    """A residual block whose normalisation has the statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return self.out(x.mean((2, 3)))


class Attending(nn.Module):
    """A small transformer, whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        h = self.encoder(self.embed(tokens) + self.place[:t], self.mask)
        return self.out(h.reshape(b * t, 8)).view(b, t, 11).transpose(1, 2)


def attending(batch_size: int = 7, **options: Any) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 11, 5), networks.classes(n, 11, 5, seed=2))  # noqa: E731
    return networks.workload(Attending, data, batch_size, **options)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(9, 6), nn.LSTM(6, 5, batch_first=True)
        self.second, self.out = nn.LSTM(5, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h, (last, _) = self.first(self.embed(tokens))
        h, _ = self.second(h)
        return self.out(h[:, -1]) + last[0, :, :3]


def recurrent(batch_size: int = 7, **options: Any) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 9, 6), networks.classes(n, 3))  # noqa: E731
    return networks.workload(Recurrent, data, batch_size, **options)


adam: dict[str, Any] = {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01), "clip_grad_norm": 0.5}
CASES: dict[str, Callable[[], Workload]] = {
    "perceptron": lambda: workload(perceptron, (10,)),
    "adam": lambda: workload(perceptron, (10,), **adam),
    "skipping": lambda: workload(Skipping, (6,)),
    "attending": lambda: attending(),
    "attending_adam": lambda: attending(**adam),
    "recurrent": lambda: recurrent(**adam),
    "tied": lambda: networks.cases["tied_weights"](7),
    "counted": lambda: networks.cases["counted_tokens_without_norm"](7),
    "masked": lambda: replace(networks.cases["a_shard_without_loss_terms"](3), model=networks.PlainTokens),
    "unused": lambda: networks.cases["parameters_without_optimizer"](7),
    "dict_inputs": lambda: networks.cases["dict_inputs"](7),
}


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", CASES)
def test_two_stages_are_the_network_of_one_device(name: str, schedule: str, microbatches: int) -> None:
    prove(CASES[name](), PipelineParallel(schedule=schedule, microbatches=microbatches), 2)


FULL = {"skipping": Skipping, "perceptron": perceptron}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("name", "workers", "microbatches"), [("skipping", 4, 8), ("attending", 3, 2), ("recurrent", 3, 5)]
)
def test_values_travel_through_the_stages_between(name: str, workers: int, microbatches: int, schedule: str) -> None:
    """Micro-batches that do not divide the batch; a last batch of one row, shorter than they are many."""
    prove(CASES[name](), PipelineParallel(schedule=schedule, microbatches=microbatches), workers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recomputed_activations_are_the_same(schedule: str) -> None:
    prove(CASES["skipping"](), PipelineParallel(schedule=schedule, microbatches=3, recompute=True), 3)


BATCH_NORM = ("batch_norm_2d", "batch_norm_cumulative", "batch_norm_used_twice", "coupled_examples")


@pytest.mark.parametrize("name", BATCH_NORM)
def test_layers_placed_on_workers_see_the_whole_batch(name: str) -> None:
    prove(networks.cases[name](7), LayerPlacement(), 2)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, adam])
def test_it_is_the_network_of_one_device_at_any_number_of_workers(workers: int, options: dict[str, Any]) -> None:
    model = lambda: Normalised()  # noqa: E731
    prove(workload(model, (2, 4, 4), 6, **options), LayerPlacement(), workers, 8)
    prove(workload(perceptron, (10,), 61, **options), PipelineParallel(), workers, 8)


# A worker's death


class Paced(nn.Module):
    """Takes its time, and is a layer that cannot be followed."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x).all()):
            time.sleep(0.002)
        return torch.tanh(x)


def paced() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 9), Paced(), nn.Linear(9, 9), nn.Dropout(0.2), Paced(), nn.Linear(9, 9), Paced(), nn.Linear(9, 3)
    )  # fmt: skip


def saved(run_dir: Path) -> dict[str, Tensor]:
    folder = run_dir / "checkpoints" / "latest"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


CUTS = {2: ("5",), 3: ("2", "5")}
"""Not measured: another cut is another order of sums, and other draws of dropout."""


def trained(strategy: Strategy, workers: int, run_dir: Path, doomed: Sequence[int] = ()) -> list[apportion.Event]:
    """``doomed``: ranks to be killed, each once the one before has been replaced; what was told of them."""
    crews: list[Crew] = []
    given = replace(workload(paced, (10,), 8, **adam), steps=120)
    faults: list[apportion.Event] = []
    waiting = list(doomed)
    with pytest.MonkeyPatch.context() as patch, by_value(networks), by_value(sys.modules[__name__]):
        patch.setattr(supervisor, "Crew", lambda *made: crews.append(Crew(*made)) or crews[-1])
        patch.setattr(verb, "_report", lambda run_dir: None)
        for event in apportion.run(given, strategy, launcher=Local(workers=workers, threads=1), run_dir=run_dir):
            faults += [event] if event.kind == "fault" else []
            if event.kind == "step" and event.step > 3 and waiting and len(faults) == len(doomed) - len(waiting):
                os.kill(crews[-1].pids()[waiting.pop(0)], signal.SIGKILL)
    assert not waiting
    return faults


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("placed", [True, False])
def test_any_rank_may_be_killed_and_nothing_is_lost(workers: int, placed: bool, tmp_path: Path) -> None:
    cuts = CUTS[workers]
    strategy = LayerPlacement(cuts=cuts) if placed else PipelineParallel(cuts=cuts, microbatches=3)
    assert trained(strategy, workers, tmp_path / "whole") == []
    faults = trained(strategy, workers, tmp_path / "run", range(workers))
    assert [fault.data["rank"] for fault in faults] == list(range(workers))
    assert all(fault.data["action"].startswith("replaced in ") for fault in faults), faults
    found, expected = saved(tmp_path / "run"), saved(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
