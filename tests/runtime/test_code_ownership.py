"""Whose code ``load``, ``export`` and ``serve`` run: the caller's own, or what the caller trusts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from apportion.api.export import export_run
from apportion.cli import app, failures
from apportion.core.strategy import State
from apportion.runtime.checkpoint import code_ownership
from apportion.runtime.checkpoint.load import load
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.serving.config import Serving
from apportion.serving.model_preparation import prepared

CODE = """
import pathlib, torch
pathlib.Path("{mark}").touch()
from torch import nn
from apportion import Workload
def net():
    return nn.Linear(3, 2)
workload = Workload(model=net, data=lambda: [], optimizer=torch.optim.SGD, batch_size=1, loss=nn.MSELoss())
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller works in it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def code(file: Path) -> Path:
    """A file that shows that it has run; where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mark = file.parent / f"{file.stem} has run"
    file.write_text(CODE.format(mark=mark))
    return mark


def trained(folder: Path, address: str | None, cwd: Path, **more: Any) -> Path:
    run = RunDirectory(folder)
    run.start({"address": address, "cwd": str(cwd), "fingerprint": {"seed": 0}, **more})
    state = State(step=1, model=dict(nn.Linear(3, 2).state_dict()))
    run.save(state, epoch=0.0, strategy="single_device", keep=3)
    return folder


def asked(run: Path, **more: Any) -> list[Callable[[], object]]:
    """Everything that takes a run directory."""
    folder = run.parent / f"{run.name}-served"
    folder.mkdir(exist_ok=True)
    return [
        lambda: load(run, **more),
        lambda: export_run(run, **more),
        lambda: prepared("m", str(run), folder, Serving(threads=1, **more), 1),
    ]


def outside(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project.parent / "elsewhere" / "mine.py")
    return trained(project / run, "mine.py:workload", mark.parent), mark


def inside_the_run(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project / run / "sub" / "mine.py")
    return trained(project / run, f"{run}/sub/mine.py:workload", project), mark


def inside_another_run(project: Path, run: str) -> tuple[Path, Path]:
    trained(project / "other", None, project)
    mark = code(project / "other" / "mine.py")
    return trained(project / run, "other/mine.py:workload", project), mark


def by_a_link(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project.parent / "elsewhere" / "mine.py")
    (project / "mine.py").symlink_to(mark.parent / "mine.py")
    return trained(project / run, "mine.py:workload", project), mark


def by_dots(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project.parent / "elsewhere" / "mine.py")
    return trained(project / run, "../elsewhere/mine.py:workload", project), mark


def changed(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project / "mine.py")
    path = trained(project / run, "mine.py:workload", project)
    (project / "mine.py").write_text((project / "mine.py").read_text() + "\n# since then\n")
    return path, mark


def without_a_digest(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project / "mine.py")
    path = trained(project / run, "mine.py:workload", project)
    (path / "run.json").write_text(json.dumps(json.loads((path / "run.json").read_text()) | {"source": None}))
    return path, mark


def a_module_outside(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project.parent / "elsewhere" / "their_module.py")
    return trained(project / run, "their_module:workload", mark.parent), mark


def a_factory_outside(project: Path, run: str) -> tuple[Path, Path]:
    mark = code(project.parent / "elsewhere" / "their_factory.py")
    factory = {
        "name": "their_factory:net",
        "file": "x",
        "sha256": code_ownership.digest(mark.parent / "their_factory.py"),
    }
    return trained(project / run, "mine.py:workload", mark.parent, factory=factory), mark


FOREIGN = [
    outside, inside_the_run, inside_another_run, by_a_link, by_dots, changed, without_a_digest, a_module_outside,
    a_factory_outside,
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_code_that_is_not_the_callers_own_does_not_run(make: Callable[..., tuple[Path, Path]], project: Path) -> None:
    run, mark = make(project, "run")
    for ask in asked(run)[:2] if make is not outside else asked(run):
        with pytest.raises(ValueError) as told:  # noqa: PT011 (what it says is looked at)
            ask()
        assert not mark.exists()
        assert "\n" not in str(told.value)
    if make not in (a_module_outside, a_factory_outside):
        assert "which is not run: " in str(told.value)
        assert "trust=True" in str(told.value)
        assert isinstance(load(run, trust=True), nn.Linear)
        assert mark.exists()
    assert isinstance(load(run, model=lambda: nn.Linear(3, 2)), nn.Linear)


@pytest.mark.parametrize("opened", ["", "mine.py", "."])
def test_without_a_project_the_current_folder_is_one_where_nobody_else_may_write(
    opened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mark = code(tmp_path / "mine.py")
    run = trained(tmp_path / "run", "mine.py:workload", tmp_path)
    if opened:
        (tmp_path / opened).chmod((tmp_path / opened).stat().st_mode | 0o020)
        with pytest.raises(ValueError, match=r"others may write to .*: chmod go-w .*; look at it, and say trust=True"):
            load(run)
    else:
        load(run)
    assert mark.exists() == (not opened)


def test_the_current_folder_is_no_project_for_what_lies_elsewhere_or_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    for folder, match in ((elsewhere, "does not lie in a project of yours"), (here, "it was changed since")):
        mark = code(folder / "mine.py")
        run = trained(folder / "run", "mine.py:workload", folder)
        with (folder / "mine.py").open("a") as file:
            file.write("# changed")
        with pytest.raises(ValueError, match=match):
            load(run)
        assert not mark.exists()


def test_code_of_the_callers_own_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = code(project / "code" / "mine.py")
    run = trained(project / "run", "mine.py:workload", project / "code")
    (project / "deep" / "down").mkdir(parents=True)
    monkeypatch.chdir(project / "deep" / "down")
    assert isinstance(load(run), nn.Linear)
    assert mark.exists()
    code(project / "code" / "our_module.py")
    assert isinstance(load(trained(project / "two", "our_module:workload", project / "code")), nn.Linear)


def test_a_folder_of_somebody_else_is_not_searched_for_what_an_own_file_imports(project: Path) -> None:
    code(project / "our_searched.py")
    sys.path.append(str(project))
    run = trained(project / "run", "our_searched:workload", project.parent / "elsewhere")
    assert isinstance(load(run), nn.Linear)
    assert str(project.parent / "elsewhere") not in sys.path


def test_an_installed_package_is_the_callers_own_once_it_is_imported(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(project / "run", "cProfile:workload", project)
    monkeypatch.delitem(sys.modules, "cProfile", raising=False)  # another test may have imported it
    assert "cProfile" not in sys.modules
    with pytest.raises(ValueError, match="has not imported the installed package cProfile"):
        load(run)
    assert "cProfile" not in sys.modules
    with pytest.raises(ValueError, match="workload is not there"):
        load(run, trust=True)


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["export", "serve"])
def test_the_command_line_says_it_in_one_sentence_with_status_2(
    verb: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mark = outside(project, "run")
    monkeypatch.setattr(sys, "argv", ["apportion", verb, str(run), *(["--port", "0"] if verb == "serve" else [])])
    with pytest.raises(SystemExit) as left:
        app.main()
    error = [line for line in capsys.readouterr().err.splitlines() if line]
    assert (left.value.code, len(error), mark.exists()) == (failures.WRONG_USE, 1, False)
    assert error[0].startswith("error: ")
    assert "--trust" in error[0]


SCRIPT = """
import torch
import apportion
from nets_of_script import Net
from torch.utils.data import TensorDataset

with open("runs.txt", "a") as file:
    file.write(__name__ + "\\n")
x = torch.randn(64, 3)
w = apportion.Workload(
    model={model}, data=lambda: TensorDataset(x, x[:, :2]), loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=16, steps=4,
)
end = apportion.train(w, "single_device", launcher=apportion.local(workers=1, threads=1), run_dir="run")
print(type(apportion.load("run")).__name__, type(apportion.load("run")) is {kind})
"""
NETS = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.processes
@pytest.mark.parametrize(("model", "kind"), [("Net", "Net"), ("lambda: torch.nn.Linear(3, 2)", "torch.nn.Linear")])
def test_load_in_the_script_that_trained_takes_its_workload_and_runs_it_once(
    model: str, kind: str, project: Path
) -> None:
    (project / "nets_of_script.py").write_text(NETS)
    (project / "script.py").write_text(SCRIPT.format(model=model, kind=kind))
    done = python("script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kind.rpartition(".")[2], "True"]
    assert (project / "runs.txt").read_text() == "__main__\n"
    # In another program the script is not run again either: the class is imported; without one it is said what to do.
    there = python("-c", "import apportion; print(type(apportion.load('run')).__name__)")
    if model == "Net":
        assert there.stdout.split() == ["Net"], there.stderr
        assert (project / "runs.txt").read_text() == "__main__\n"
    else:
        assert "trains while load() imports it" in there.stderr.splitlines()[-1]
        assert "load(..., model=...)" in there.stderr.splitlines()[-1]


def test_a_mark_in_a_folder_that_all_users_share_makes_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, here = tmp_path / "shared", tmp_path / "shared" / "here"
    here.mkdir(parents=True)
    mark = code(shared / "mine.py")
    run = trained(shared / "run", "mine.py:workload", shared)
    (shared / "pyproject.toml").touch()  # as any user may, in /tmp
    shared.chmod(0o1777)
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="does not lie in a project of yours"):
        load(run)
    assert not mark.exists()
