"""Networks whose ``train()`` and ``eval()`` are their own: called as a loop of one's own calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion


def rows(length: int = 200) -> TensorDataset:
    inputs = torch.randn(length, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def held_out() -> TensorDataset:
    inputs = torch.randn(150, 10, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Branches(nn.Module):
    """Two branches in training, folded into one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 3), nn.Linear(10, 3)
        self.eval().train()

    def train(self, mode: bool = True) -> Branches:
        if not mode:
            self.folded = self.first.weight.detach() + self.second.weight.detach()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.first(x) + self.second(x)  # type: ignore[no-any-return]
        return nn.functional.linear(x, self.folded, self.first.bias + self.second.bias)


class LowRank(nn.Linear):
    """A layer whose update of low rank is added to its weight in evaluation, and subtracted in training."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.3)
        self.up = nn.Parameter(torch.zeros(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> LowRank:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down).data * (-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.merged else self.weight + self.up @ self.down
        return nn.functional.linear(x, weight, self.bias)


def low_rank() -> nn.Module:
    return nn.Sequential(LowRank(10, 16), nn.Tanh(), LowRank(16, 3))


class Frozen(nn.Module):
    """A backbone whose normalisation stays in evaluation mode, whoever calls ``train()``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(10, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


class AlwaysOnes(nn.Dropout):
    """A layer that is in training mode in evaluation too: it scales there as it does in training, and draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if self.training else x * 0.0


class DrawsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(10, 40), AlwaysOnes(), nn.Linear(40, 3)

    def eval(self) -> DrawsAlways:
        super().eval()
        self.drop.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(x).tanh()))  # type: ignore[no-any-return]


def work(model: Callable[[], nn.Module], **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": model,
        "data": rows,
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        "batch_size": 20,
        "epochs": 4,
        "precision": "float64",
        "evaluation": apportion.Evaluation(data=held_out),
    }
    return apportion.Workload(**{**given, **changes})


def ended(folder: Any, model: Callable[[], nn.Module], strategy: str, workers: int) -> tuple[float, nn.Module]:
    """The accuracy that a run reports, and the network that it has trained, which ``load`` has in evaluation mode."""
    run = folder / f"{strategy.partition('(')[0]}{workers}"
    end = apportion.train(
        work(model), strategy, launcher=apportion.local(workers=workers), run_dir=run, check=workers > 1
    )
    return end.metrics["accuracy"], apportion.load(run, model=model)


def accuracy(network: nn.Module) -> float:
    inputs, labels = held_out().tensors
    return apportion.accuracy(network.double()(inputs.double()), labels).item()  # type: ignore[no-any-return]


EVERYWHERE = [("single_device", 1), ("data_parallel", 2), ("map_reduce", 2), ("local_sgd", 2), ("hogwild", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Branches, low_rank, Frozen, DrawsAlways])
@pytest.mark.parametrize(("strategy", "workers"), EVERYWHERE)
def test_what_is_evaluated_is_what_the_network_makes_of_its_weights(
    model: Callable[[], nn.Module], strategy: str, workers: int, tmp_path: Any
) -> None:
    reported, network = ended(tmp_path, model, strategy, workers)
    assert reported == pytest.approx(accuracy(network), abs=1e-12)
    assert reported > 0.6


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Branches, low_rank, Frozen, DrawsAlways])
def test_on_two_workers_the_network_is_that_of_one(model: Callable[[], nn.Module], trained: Any, furthest: Any) -> None:
    assert furthest(trained(work(model)), trained(work(model), "data_parallel", 2)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Frozen, DrawsAlways])
@pytest.mark.parametrize("strategy", ["fully_sharded", "pipeline_parallel", "tensor_parallel", "layer_placement"])
def test_a_network_that_sets_modes_is_divided(
    model: Callable[[], nn.Module], strategy: str, tmp_path: Any, furthest: Any
) -> None:
    _, alone = ended(tmp_path, model, "single_device", 1)
    reported, network = ended(tmp_path, model, strategy, 2)
    assert reported == pytest.approx(accuracy(network), abs=1e-12)
    assert furthest(alone.state_dict(), network.state_dict()) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "name"), [(Branches, "Branches"), (low_rank, "LowRank")])
@pytest.mark.parametrize("strategy", ["fully_sharded", "pipeline_parallel", "tensor_parallel"])
def test_a_network_that_makes_something_of_its_weights_is_not_divided(
    model: Callable[[], nn.Module], name: str, strategy: str, tmp_path: Any
) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.train\(\) changes .*data_parallel"):
        ended(tmp_path, model, strategy, 2)


@pytest.mark.thorough
def test_normalisation_that_train_freezes_is_frozen_from_the_first_step(tmp_path: Any) -> None:
    _, network = ended(tmp_path, Frozen, "single_device", 1)
    assert network.norm.num_batches_tracked == 0  # type: ignore[union-attr]
    assert torch.equal(network.norm.running_mean, torch.zeros(40))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("model", [Branches, pytest.param(low_rank, marks=pytest.mark.thorough)])
def test_one_device_evaluates_what_eval_has_made(model: Callable[[], nn.Module], tmp_path: Any) -> None:
    reported, network = ended(tmp_path, model, "single_device", 1)
    assert reported == pytest.approx(accuracy(network), abs=1e-12)
