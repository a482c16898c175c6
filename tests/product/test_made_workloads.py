"""``mine.py:make(lr=0.2)``: a function that makes a workload, its arguments, and grids of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from small_work import FILE

import apportion

Command = Callable[..., CompletedProcess[str]]
MAKE = """
def make(lr=0.05, width=16, activation="relu", loss_name="cross:entropy", steps=6):
    assert loss_name in ("cross:entropy", "a(b):c")
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh}
    return work(
        model=lambda: nn.Sequential(nn.Linear(6, width), kinds[activation](), nn.Linear(width, 3)),
        optimizer=lambda p: torch.optim.SGD(p, lr=lr),
        steps=steps,
        evaluation=apportion.Evaluation(data=rows),
    )

def other():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "mine.py").write_text(FILE + MAKE)
    (tmp_path / "a (copy)").mkdir()
    (tmp_path / "a (copy)" / "mine.py").write_text(FILE + MAKE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / "run.json").read_text())
    return found


@pytest.mark.parametrize(
    ("address", "arguments"),
    [
        ("mine.py:make", {"lr": 0.05, "width": 16}),
        ("mine.py:make()", {"lr": 0.05, "width": 16}),
        ("mine.py:make(lr=0.2, width=8)", {"lr": 0.2, "width": 8}),
        ("mine.py:make(loss_name='a(b):c')", {"loss_name": "a(b):c"}),
        ("a (copy)/mine.py:make(activation='tanh')", {"activation": "tanh"}),
    ],
)
def test_a_run_is_made_of_the_arguments_of_its_address(
    address: str, arguments: dict[str, object], folder: Path
) -> None:
    result = apportion.train(address, "single_device", run_dir=folder / "run")
    about = recorded(result.run_dir)
    assert about["address"] == address
    fingerprint = about["fingerprint"]
    assert isinstance(fingerprint, dict)
    assert {name: fingerprint[f"argument {name}"] for name in arguments} == arguments
    loaded = apportion.load(result.run_dir)
    width = arguments.get("width", 16)
    assert next(loaded.parameters()).shape == (width, 6)
    report = (result.run_dir / "report.html").read_text()
    assert all(f"argument {name}" in report for name in arguments)


def test_a_run_is_resumed_with_the_same_arguments_alone(folder: Path) -> None:
    apportion.train("mine.py:make(lr=0.1)", "single_device", run_dir=folder / "run")
    resumed = apportion.train("mine.py:make(lr=0.1, steps=6)", "single_device", run_dir=folder / "run", resume=True)
    assert resumed.step == 6
    with pytest.raises(ValueError, match=r"argument lr was 0\.1 and is 0\.2"):
        apportion.train("mine.py:make(lr=0.2)", "single_device", run_dir=folder / "run", resume=True)


WRONG = {
    "mine.py:make(rate=0.1)": "'rate'",
    "mine.py:make(0.1)": "by name",
    "mine.py:make(lr=rate)": "'rate'",
    "mine.py:make(lr=0.1": "does not parse",
    "mine.py:workload(lr=0.1)": "takes no arguments",
    "mine.py:other": "int",
    "mine.py:made(lr=0.1)": "did you mean make",
}


@pytest.mark.parametrize("address", WRONG)
def test_an_address_that_cannot_be_called_is_refused(address: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(WRONG[address])):
        apportion.train(address, "single_device", run_dir=folder / "run")


@pytest.mark.parametrize(
    "address", [pytest.param(a, marks=[] if "0.1," in a or a.endswith("0.1") else pytest.mark.thorough) for a in WRONG]
)
def test_an_address_that_cannot_be_called_has_status_2(address: str, folder: Path, apportion_command: Command) -> None:
    ran = apportion_command("train", address, "single_device")
    assert ran.returncode == 2
    assert WRONG[address] in ran.stderr


@pytest.mark.parametrize("rates", [[0.2], pytest.param([0.01, 0.2], marks=pytest.mark.thorough)])
def test_a_grid_trains_each_combination_and_says_how_well(
    rates: list[float], folder: Path, apportion_command: Command
) -> None:
    ran = apportion_command(
        "train", "mine.py:make(steps=5)", "single_device", "--run-dir", "runs/grid",
        "--grid", f"lr={rates}", "--grid", "activation=['relu', 'tanh']",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    names = [f"lr={lr},activation={a}" for lr in rates for a in ("relu", "tanh")]
    assert {path.name for path in (folder / "runs" / "grid").iterdir()} == set(names)
    table = ran.stdout.splitlines()[-1 - len(names) :]
    assert table[0].split()[0] == "member"
    assert "test accuracy" in table[0]
    assert [line.split()[0] for line in table[1:]] == names
    for name in names:
        fingerprint = recorded(folder / "runs" / "grid" / name)["fingerprint"]
        assert isinstance(fingerprint, dict)
        assert f"lr={fingerprint['argument lr']},activation={fingerprint['argument activation']}" == name
        assert fingerprint["argument steps"] == 5


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        (["lr"], "lr"),
        (["lr=0.1"], "a list"),
        (["lr=[a]"], "[a]"),
        (["lr=[0.1]", "lr=[0.2]"], "twice"),
        (["width=[8]"], "width"),
        (["lr=[]"], "at least one value"),
    ],
)
def test_a_grid_that_is_written_wrongly_is_refused(
    axes: list[str], named: str, folder: Path, apportion_command: Command
) -> None:
    flags = [word for axis in axes for word in ("--grid", axis)]
    ran = apportion_command("train", "mine.py:make(width=16)", *flags)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert named in ran.stderr


@pytest.mark.thorough
def test_a_member_of_a_grid_that_fails_is_named(folder: Path, apportion_command: Command) -> None:
    ran = apportion_command(
        "train", "mine.py:make", "single_device", "--grid", "activation=['relu', 'none']", "--run-dir", "g"
    )
    assert ran.returncode == 3
    assert "activation=none" in ran.stderr
    assert (folder / "g" / "activation=relu" / "checkpoints" / "latest").exists()
