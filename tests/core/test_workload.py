"""What a workload refuses as soon as it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload

GIVEN: dict[str, Any] = {
    "model": lambda: nn.Linear(4, 3),
    "data": lambda: TensorDataset(torch.ones(8, 4), torch.arange(8) % 3),
    "loss": nn.functional.cross_entropy,
    "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    "batch_size": 4,
}


def test_a_network_in_place_of_the_function_that_makes_it_is_refused_with_the_cure() -> None:
    """A module can be called, so it passes for a function, and the first rank to call it would fail."""
    Workload(**GIVEN)
    for made in (nn.Linear(4, 3), nn.Sequential()):
        name = type(made).__name__
        with pytest.raises(ValueError, match=rf"model={name}\(\.\.\.\) is a network .* model=lambda: {name}\(\.\.\.\)"):
            Workload(**{**GIVEN, "model": made})
    Workload(**{**GIVEN, "model": nn.Sequential})  # a class is a function that makes one


@pytest.mark.parametrize(
    ("name", "made"),
    [("data", GIVEN["data"]()), ("optimizer", torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))],
)
def test_the_others_are_refused_too(name: str, made: Any) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^{name}=.* must be a function"):
        Workload(**{**GIVEN, name: made})
