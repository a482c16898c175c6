"""Optimizers that look over all weights, evaluate the loss themselves, or leave weights out: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import apportion


def rows() -> TensorDataset:
    inputs = torch.randn(120, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(10, 48), nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.inner(x).relu())  # type: ignore[no-any-return]


def work(optimizer: Callable[..., Any], model: Callable[[], nn.Module] = deep, **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": model,
        "data": rows,
        "loss": nn.functional.cross_entropy,
        "optimizer": optimizer,
        "batch_size": 20,
        "steps": 12,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


def unit_length(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    length = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    torch._foreach_div_(gradients, length)


def normalised(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    optimizer.register_step_pre_hook(unit_length)
    return optimizer


def bounded(parameters: Any) -> torch.optim.Optimizer:
    """Adam whose rows of weights are kept within a norm after each step."""
    optimizer = torch.optim.Adam(parameters, lr=0.05)

    def within(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.mul_((0.8 / p.norm(dim=0, keepdim=True)).clamp(max=1.0))

    optimizer.register_step_post_hook(within)
    return optimizer


def hooked_for_all(parameters: Any) -> torch.optim.Optimizer:
    """A hook of every optimizer, which is removed with the process."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(unit_length)
    return torch.optim.SGD(parameters, lr=0.05)


WHOLE = [("data_parallel", 2), ("map_reduce", 2)]
DIVIDED = ["fully_sharded", "tensor_parallel", "pipeline_parallel", "layer_placement"]


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [normalised, bounded])
@pytest.mark.parametrize(("strategy", "workers"), WHOLE)
def test_a_step_hook_sees_the_whole(optimizer: Any, strategy: str, workers: int, trained: Any, furthest: Any) -> None:
    for model in (deep, Residual):
        given = work(optimizer, model)
        assert furthest(trained(given), trained(given, strategy, workers, check=False)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "name"), [(normalised, "unit_length"), (bounded, "within"), (hooked_for_all, "unit_length")]
)
@pytest.mark.parametrize("strategy", DIVIDED)
def test_a_step_hook_that_would_see_a_part_is_refused_by_name(
    optimizer: Any, name: str, strategy: str, trained: Any
) -> None:
    with pytest.raises(ValueError, match=rf"has the step hook {name}, and .*data_parallel"):
        trained(work(optimizer, Residual), strategy, 2, check=False)


@pytest.mark.thorough
def test_a_hook_of_all_optimizers_sees_the_whole_of_shared_weights(trained: Any, furthest: Any) -> None:
    given = work(hooked_for_all)
    assert furthest(trained(given), trained(given, "data_parallel", 2, check=False)) < 1e-9


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimization that evaluates the loss twice by its closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        weights = [p for group in self.param_groups for p in group["params"]]
        ways = [p.grad * 0.05 for p in weights]
        torch._foreach_add_(weights, ways)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(weights, ways)
        super().step()
        return loss


class TwoSteps(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer: the gradient is there when it is called."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **given: Any) -> None:
        super().__init__(parameters, {"rho": rho, **given})
        self.base = base(self.param_groups, **given)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "sharpness-aware minimization requires a closure"
        closure = torch.enable_grad()(closure)
        weights = [p for group in self.param_groups for p in group["params"]]
        length = torch.stack([p.grad.norm() for p in weights]).norm()
        before = [p.data.clone() for p in weights]
        for p in weights:
            p.data += 0.05 * p.grad / (length + 1e-12)
        self.zero_grad()
        loss = closure()
        for p, value in zip(weights, before, strict=True):
            p.data = value
        self.base.step()
        return loss


def sharpness(parameters: Any) -> torch.optim.Optimizer:
    return Sharpness(parameters, lr=0.1)


def two_steps(parameters: Any) -> torch.optim.Optimizer:
    return TwoSteps(parameters, torch.optim.SGD, lr=0.1)


def by_hand(optimizer: Any, begin: dict[str, Tensor], model: Callable[[], nn.Module], first: bool) -> dict[str, Tensor]:
    """The weights after 5 updates by all rows, in a loop of one's own. ``first``: the gradient is computed before."""
    network = model().double()
    network.load_state_dict(begin)
    made = optimizer(list(network.parameters()))
    (inputs, labels) = next(iter(DataLoader(rows(), batch_size=120)))

    def closure() -> Tensor:
        made.zero_grad()
        loss = nn.functional.cross_entropy(network(inputs.double()), labels)
        loss.backward()
        return loss

    for _ in range(5):
        if first:
            closure()
        made.step(closure)
    return network.state_dict()


class Seeded(nn.Sequential):
    """A network with the same weights in every process."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "first"), [(sharpness, False), (two_steps, True)])
@pytest.mark.parametrize(("strategy", "workers"), [("single_device", 1), ("map_reduce", 2)])
def test_an_optimizer_that_needs_a_closure_gets_one(
    optimizer: Any, first: bool, strategy: str, workers: int, trained: Any, furthest: Any
) -> None:
    begin = Seeded().double().state_dict()
    right = by_hand(optimizer, begin, Seeded, first)
    given = work(optimizer, Seeded, batch_size=120, steps=5)
    assert furthest(right, trained(given, strategy, workers, check=workers > 1)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "name"), [(sharpness, "Sharpness"), (two_steps, "TwoSteps")])
@pytest.mark.parametrize("strategy", ["data_parallel", "fully_sharded", "local_sgd", "hogwild", "tensor_parallel"])
def test_where_the_loss_is_evaluated_once_it_is_refused_by_name(
    optimizer: Any, name: str, strategy: str, trained: Any
) -> None:
    with pytest.raises(ValueError, match=rf"(\b{name}\b.*map_reduce|the parameter store has no rule for {name})"):
        trained(work(optimizer), strategy, 2, check=False)


class Centres(nn.Module):
    """A loss that draws outputs to the centre of their class, which it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3, 3))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        near = (outputs - self.centres[labels]).square().sum(1).mean()
        return nn.functional.cross_entropy(outputs, labels) + 0.1 * near


def margins() -> Callable[[Tensor, Tensor], Tensor]:
    scale = torch.ones(3, requires_grad=True)
    return lambda outputs, labels: nn.functional.cross_entropy(outputs * scale, labels)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("loss", [Centres, pytest.param(margins, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("strategy", "workers"), [("single_device", 1), pytest.param("data_parallel", 2, marks=pytest.mark.thorough)]
)
def test_a_loss_with_weights_of_its_own_is_refused_with_both_remedies(
    loss: Any, strategy: str, workers: int, trained: Any
) -> None:
    with pytest.raises(ValueError, match=r"loss= keeps .*part of the model.*requires_grad_\(False\)"):
        trained(work(plain, loss=loss()), strategy, workers, check=False)


@pytest.mark.thorough
def test_a_loss_whose_weights_ask_for_no_gradient_trains(trained: Any, furthest: Any) -> None:
    given = work(plain, loss=Centres().requires_grad_(False))
    assert furthest(trained(given), trained(given, "data_parallel", 2)) < 1e-9


class Critic(nn.Module):
    """A critic whose weights are clamped by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for p in self.parameters():
                p.data.clamp_(-0.1, 0.1)
        return self.layers(x)  # type: ignore[no-any-return]


class Spheres(nn.Linear):
    """A layer that keeps its rows within the sphere, and at first has nothing to do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_((9.0 / self.weight.norm(dim=1, keepdim=True)).clamp(max=1.0))
        return super().forward(x)


def spheres() -> nn.Module:
    return nn.Sequential(Spheres(10, 64), nn.Tanh(), nn.Linear(64, 3))


class Bounded(nn.Linear):
    """A layer whose weights are written to by name, as an output of an operation."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.clamp(self.weight, -0.1, 0.1, out=self.weight)
        return super().forward(x)


def bounded() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), Bounded(64, 3))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "name"), [(Critic, "layers.0.weight"), (spheres, "0.weight"), (bounded, "2.weight")])
def test_weights_that_the_forward_writes_to_are_not_spread(
    model: Any, name: str, trained: Any, furthest: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"the forward of \w+ writes to {name}, .*data_parallel"):
        trained(work(plain, model), "fully_sharded", 2, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [deep, Residual])
def test_a_scalar_of_an_optimizer_keeps_its_type_over_a_resume(model: Any, tmp_path: Path, furthest: Any) -> None:
    """NAdam keeps a product of momenta in float32 beside weights in float64."""

    def ended(name: str, steps: int, **options: Any) -> dict[str, Tensor]:
        made = work(lambda parameters: torch.optim.NAdam(parameters, lr=0.01), model, steps=steps)
        apportion.train(made, "single_device", run_dir=tmp_path / name, **options)
        state: dict[str, Tensor] = apportion.load(tmp_path / name, model=model).state_dict()
        return state

    ended("left", 5)
    assert furthest(ended("left", 12, resume=True), ended("undisturbed", 12)) == 0.0
