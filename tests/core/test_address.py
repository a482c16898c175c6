"""Workloads by address."""

from __future__ import annotations

from pathlib import Path

import pytest

import apportion
from apportion.core.address import load_workload
from apportion.core.place_names import check_place

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")


@pytest.mark.processes
@pytest.mark.thorough
def test_a_workload_loaded_from_a_file_travels_to_workers_as_an_object(tmp_path: Path) -> None:
    workload = load_workload(f"{DIGITS}:workload")
    end = apportion.train(workload, "data_parallel", launcher=apportion.local(2), run_dir=tmp_path / "run", steps=3)
    assert end.step == 3


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("digits.py", "write FILE:NAME"),
        (":workload", "write FILE:NAME"),
        ("nowhere/none.py:workload", "there is no file nowhere/none.py"),
        (f"{DIGITS}:nothing", "nothing is not there; (it has|did you mean) workload"),
        (
            f"{DIGITS}:network",
            "returned a Sequential, and it must return an apportion.Workload; it has workload",
        ),
        ("no_such_module:workload", "there is no module no_such_module"),
    ],
)
def test_a_wrong_address_is_told_with_what_there_is(address: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_workload(address)


def test_the_cheap_check_imports_nothing() -> None:
    check_place("no_such_module:workload")
    with pytest.raises(ValueError, match="there is no file"):
        check_place("none.py:workload")
