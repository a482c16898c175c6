"""Networks that draw random numbers as they compute train where each row has draws of its own, and are refused by what
draws elsewhere, unless the workload accepts it by name."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion


def images() -> TensorDataset:
    inputs = torch.rand(48, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.flatten(1)[:, :3].argmax(1))


def rows() -> TensorDataset:
    inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def workload(model: Any, data: Any = rows, **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": model,
        "data": data,
        "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "batch_size": 20,
    }
    return apportion.Workload(**{**given, **changes})


def tabular(layer: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), layer(), nn.Linear(12, 3))


class Reparametrise(nn.Module):
    """A convolutional bottleneck that is sampled from a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Conv2d(2, 8, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).mean((2, 3)).chunk(2, 1)
        return self.head(torch.distributions.Normal(mean, spread.exp()).rsample())  # type: ignore[no-any-return]


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.7)
        return x + self.branch(x) * kept / 0.7  # type: ignore[no-any-return]


class NoiseInTime(nn.Module):
    """Noise in sequences whose second dimension is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(Noisy.noise(x.view(len(x), 4, 2).transpose(0, 1)))[0]
        return self.head(hidden[-1])  # type: ignore[no-any-return]


class Noisy(nn.Module):
    @staticmethod
    def noise(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(x)


class Categorical(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.multinomial(x.softmax(-1), 2).to(x.dtype).sum(1, keepdim=True)


class WeightNoise(nn.Linear):
    """One draw for all rows of a batch."""

    def __init__(self) -> None:
        super().__init__(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (1 + 0.1 * torch.randn_like(self.weight)), self.bias)


class NumpyRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.uniform(0.5, 1.5, (len(x), 1))).to(x.dtype)


class Skips(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.6 else x


class Loose(nn.Dropout):
    """Drops more on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1 + 0.2 * int(os.environ.get("RANK", "0")), self.training)


class Looser(nn.Module):
    """Draws for each row, with a probability that is another on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.8 - 0.2 * int(os.environ.get("RANK", "0")))


def adversarial(step: Any, batch: Any) -> dict[str, Tensor]:
    noise = torch.randn(len(batch.inputs), 8, dtype=batch.inputs.dtype)
    return {"loss": step.minimize((step.model(noise) - step.model(batch.inputs)).mean(), batch)}


def noisy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs + 0.2 * torch.rand_like(outputs), targets)


ROWS = {
    "a convolutional bottleneck": (workload(Reparametrise, images), "Reparametrise"),
    "stochastic depth": (workload(tabular(StochasticDepth)), "StochasticDepth"),
    "noise in time": (workload(NoiseInTime), "NoiseInTime"),
    "samples of a distribution": (workload(tabular(Categorical)), "Categorical"),
    "a loss": (workload(tabular(nn.Identity), loss=noisy_loss), "noisy_loss"),
    "an update": (workload(tabular(nn.Identity), loss=None, update=adversarial), "adversarial"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", list(ROWS))
@pytest.mark.parametrize("workers", [2, 3])
def test_draws_for_each_row_are_named_and_the_network_is_proved(which: str, workers: int) -> None:
    given, name = ROWS[which]
    proof = apportion.check(given, "data_parallel", workers=workers, steps=3)
    assert proof.verdict == "equal", proof.sentence
    assert any(name in line for line in proof.by_design)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["map_reduce", "fully_sharded", "data_parallel(microbatches=2)"])
def test_they_are_the_same_under_other_strategies(strategy: str) -> None:
    proof = apportion.check(workload(tabular(StochasticDepth)), strategy, workers=2, steps=2)
    assert proof.verdict == "equal", proof.sentence


def test_a_network_that_draws_for_each_row_trains(tmp_path: Path, no_cached_proofs: Path) -> None:
    made = workload(tabular(Noisy), steps=3)
    run = apportion.train(made, "data_parallel", launcher=apportion.local(2), run_dir=tmp_path / "run")
    assert run.reason == "finished"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["proof"]["verdict"] == "equal"


REFUSED = {
    "noise of weights": (workload(tabular(WeightNoise)), "WeightNoise"),
    "numpy, by row": (workload(tabular(NumpyRows)), "NumpyRows"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", list(REFUSED))
def test_other_draws_are_refused_by_what_draws_and_how_to_accept_it(which: str, tmp_path: Path) -> None:
    given, name = REFUSED[which]
    with pytest.raises(apportion.Disproved) as raised:
        apportion.train(given, "data_parallel", launcher=apportion.local(2), run_dir=tmp_path / "run")
    assert "it draws random numbers" in str(raised.value)
    assert f'per_rank_draws=("{name}",)' in str(raised.value)


@pytest.mark.thorough
def test_what_is_accepted_by_name_trains_and_is_recorded(tmp_path: Path) -> None:
    given, name = REFUSED["noise of weights"]
    accepted = workload(given.model, per_rank_draws=(name,), steps=6)
    run_dir = tmp_path / "run"
    apportion.train(accepted, "data_parallel", launcher=apportion.local(2), run_dir=run_dir)
    run = json.loads((run_dir / "run.json").read_text())
    assert run["proof"]["verdict"] == "equal"
    assert run["fingerprint"]["per rank draws"] == [name]
    more = workload(given.model, steps=9)
    with pytest.raises(ValueError, match="per rank draws"):
        apportion.train(more, "data_parallel", launcher=apportion.local(2), run_dir=run_dir, resume=True, check=False)


@pytest.mark.thorough
def test_the_rest_of_a_network_whose_draws_are_accepted_is_still_proved() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1.0 + 1e-6 * int(os.environ.get("RANK", "0")))

    model = lambda: nn.Sequential(nn.Linear(8, 12), Reads(), WeightNoise(), nn.Linear(12, 3))  # noqa: E731
    proof = apportion.check(workload(model, per_rank_draws=("WeightNoise",)), "data_parallel", workers=2, steps=2)
    assert proof.verdict == "different"
    assert not any("it draws" in cause for cause in proof.causes)


@pytest.mark.parametrize(
    "names", ["WeightNoise", ("Wieghtnoise",)], ids=["a text in the place of names", "a name that nothing has"]
)
@pytest.mark.thorough
def test_a_name_that_stands_for_nothing_is_refused(names: Any, tmp_path: Path) -> None:
    def train() -> None:
        made = workload(tabular(WeightNoise), per_rank_draws=names)
        apportion.train(made, run_dir=tmp_path / "run")

    with pytest.raises((ValueError, apportion.WorkerFailed), match="per_rank_draws"):
        train()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["pipeline_parallel", "layer_placement"])
def test_pythons_random_in_layers_of_stages_is_named(strategy: str) -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 8), Skips(8, 8), nn.Tanh(), Skips(8, 8), nn.Linear(8, 3))  # noqa: E731
    proof = apportion.check(workload(model), strategy, workers=2, steps=4)
    assert proof.verdict == "equal" or any("random in" in c and "Skips" in c for c in proof.causes), proof.sentence


@pytest.mark.thorough
@pytest.mark.parametrize("layer", [Loose, Looser])
def test_a_rate_that_depends_on_the_rank_is_found(layer: Any) -> None:
    proof = apportion.check(workload(tabular(layer)), "data_parallel", workers=2, steps=2)
    assert proof.verdict == "different"
