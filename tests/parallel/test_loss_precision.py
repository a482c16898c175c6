"""A loss in float64: what it keeps is cast, wherever that is, and the user's own loss stays as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.parallel.replica.loss_precision import loss_in_precision

WEIGHT = torch.tensor([1.0, 2.0, 30.0])
CRITERION = nn.CrossEntropyLoss(weight=WEIGHT)
calls = 0


def of_a_global(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, WEIGHT)


def of_a_global_module(outputs: Tensor, targets: Tensor) -> Tensor:
    return by_another(outputs, targets)


def by_another(outputs: Tensor, targets: Tensor) -> Tensor:
    return CRITERION(outputs, targets)  # type: ignore[no-any-return]


def of_a_default(outputs: Tensor, targets: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    return functional.cross_entropy(outputs, targets, weight)


class OfAnAttribute:
    def __init__(self) -> None:
        self.kept = {"weights": [WEIGHT]}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, self.kept["weights"][0])

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=WEIGHT)
        self.plain = torch.ones(3)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner(outputs * self.plain, targets)  # type: ignore[no-any-return]


def of_a_closure() -> Callable[..., Tensor]:
    criterion = nn.CrossEntropyLoss(weight=WEIGHT)
    return lambda outputs, targets: criterion(outputs, targets)


def counting(outputs: Tensor, targets: Tensor) -> Tensor:
    global calls
    calls += 1
    return functional.cross_entropy(outputs, targets, WEIGHT)


LOSSES: dict[str, Any] = {
    "module": CRITERION,
    "nested": Nested(),
    "partial": functools.partial(functional.cross_entropy, weight=WEIGHT),
    "closure": of_a_closure(),
    "default": of_a_default,
    "global": of_a_global,
    "global module of another function": of_a_global_module,
    "attribute": OfAnAttribute(),
    "method": OfAnAttribute().method,
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_keeps_is_cast_and_the_loss_itself_is_not(name: str) -> None:
    loss = LOSSES[name]
    outputs, targets = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 0])
    with pytest.raises(RuntimeError):
        loss(outputs, targets)
    cast = loss_in_precision(loss, torch.float64)
    expected = functional.cross_entropy(outputs, targets, WEIGHT.double())
    torch.testing.assert_close(cast(outputs, targets), expected)
    assert WEIGHT.dtype is torch.float32
    with pytest.raises(RuntimeError):
        loss(outputs, targets)


def test_a_loss_with_nothing_to_cast_is_the_same_object() -> None:
    plain: list[Any] = [functional.mse_loss, nn.MSELoss(), nn.CrossEntropyLoss(weight=WEIGHT.double()), lambda a, b: a]
    assert all(loss_in_precision(loss, torch.float64) is loss for loss in plain)


def test_what_is_trained_is_left_alone() -> None:
    network = nn.Linear(2, 2)
    penalised = lambda outputs, targets: outputs.mean() + network.weight.norm()  # noqa: E731
    assert loss_in_precision(penalised, torch.float64) is penalised


def test_a_function_that_assigns_to_a_global_keeps_its_globals() -> None:
    assert loss_in_precision(counting, torch.float64) is counting
