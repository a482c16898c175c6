"""Functions and tensors travel to the ranks: by value where a module's name leads nowhere, tensors as float64."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from apportion.testing import transfer

SOURCE = """
import torch

FACTOR = torch.tensor(0.5)


def doubled(x):
    return 2 * FACTOR * x


class Named:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that is imported from a file which no entry of the path leads to."""
    file = tmp_path / "out_of_the_way.py"
    file.write_text(SOURCE)
    made: Any = types.ModuleType("out_of_the_way")
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "out_of_the_way", made)
    exec(compile(SOURCE, file, "exec"), vars(made))
    return made


@pytest.mark.parametrize("caller", ["out_of_the_way", "elsewhere"])
def test_a_function_of_a_module_without_a_way_travels_by_value(
    module: Any, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(cloudpickle.list_registry_pickle_by_value())  # what other tests of this process have left there
    data = transfer.packed(module.doubled, [module.doubled], caller)
    monkeypatch.delitem(sys.modules, "out_of_the_way")
    result = transfer.unpacked(data)(torch.ones(2, dtype=torch.float64))
    assert result.dtype == torch.float64
    assert result.tolist() == [1, 1]
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


def test_a_module_that_can_be_imported_travels_by_its_name() -> None:
    data = transfer.packed(transfer.packed, [transfer.packed], "elsewhere")
    assert transfer.unpacked(data) is transfer.packed


def test_tensors_arrive_in_float64_and_parameters_stay_what_they_are() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net.append(net[0])
    sent = {"net": net, "rows": torch.ones(3), "counts": torch.ones(3, dtype=torch.int64), "half": torch.ones(2).half()}
    got = transfer.unpacked(transfer.packed(sent, [], "elsewhere"))
    assert {name: got[name].dtype for name in ("rows", "counts", "half")} == {
        "rows": torch.float64, "counts": torch.int64, "half": torch.float64,
    }  # fmt: skip
    assert got["net"][0] is got["net"][2]
    assert all(type(p) is nn.Parameter and p.dtype == torch.float64 for p in got["net"].parameters())
    assert {b.dtype for b in got["net"].buffers()} == {torch.float64, torch.int64}


def test_what_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot pickle '_thread.lock' object\): make it inside of the function"):
        transfer.packed(lambda: lock, [], __name__)
