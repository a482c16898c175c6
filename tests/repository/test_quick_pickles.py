"""Functions are pickled with the modules that cloudpickle would have found."""

from __future__ import annotations

import os
import os.path
from collections.abc import Callable
from typing import Any

import pytest
import quick_pickles
import torch
import torch.nn.functional as F
import torch.utils.data
from torch import nn


def through_the_package(x: Any) -> Any:
    return torch.nn.functional.relu(x), torch.utils.data.DataLoader


def from_its_middle(x: Any) -> Any:
    return nn.init.zeros_(x), nn.modules.conv.Conv1d


def of_a_module_without_others(x: Any) -> Any:
    return F.relu(x), os.path.join(x)


@pytest.mark.parametrize("function", [through_the_package, from_its_middle, of_a_module_without_others])
def test_the_modules_below_those_that_a_function_names_are_found(function: Callable[..., Any]) -> None:
    named = [torch, nn, F, os, 3]
    wanted = quick_pickles.slowly(function.__code__, named)
    found = quick_pickles.imported_below(function.__code__, named)
    assert {module.__name__ for module in found} == {module.__name__ for module in wanted}
    assert len(found) == len(wanted)


def test_a_module_below_another_is_found() -> None:
    found = quick_pickles.imported_below(from_its_middle.__code__, [nn])
    assert {module.__name__ for module in found} == {"torch.nn.init", "torch.nn.modules", "torch.nn.modules.conv"}
