"""apportion from Python: a script, what has no file (standard input, a notebook), and the module that comes out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import apportion
from apportion.reporting.journal import read_events

pytestmark = pytest.mark.processes

SECONDS = 90
DEFINITIONS = """
import dataclasses
import json

import torch
from torch import nn
from torch.utils.data import Dataset

import apportion


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.x[index].sum() > 0)


def network(width=16):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

        def forward(self, x):
            return self.layers(x)

    return Local()


rate = 0.02
workload = apportion.Workload(
    model=network,
    data=Points,
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
    batch_size=48,
    epochs=6,
    evaluation=apportion.Evaluation(data=lambda: Points(), every=None),
)
launcher = apportion.local(workers=2, threads=1, device="cpu")


def accuracy_of(model):
    points = Points()
    x, y = points.x, (points.x.sum(1) > 0).long()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())
"""
TRAIN = """
end = apportion.train(workload, "data_parallel", launcher=launcher, run_dir="run")
kinds = [event.kind for event in apportion.run(workload, "data_parallel", launcher=launcher, run_dir="again", steps=7)]
longer = dataclasses.replace(workload, epochs=1, batch_size=24)
other = apportion.train(longer, apportion.single_device(), run_dir="other")
print(json.dumps({"metrics": dict(end.data["metrics"]), "kinds": kinds, "steps": [end.step, other.step]}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "pyproject.toml").touch()  # what lies here is the caller's own
    return tmp_path


def python(*arguments: str, said: str = "") -> str:
    """What Python prints."""
    done = subprocess.run(
        [sys.executable, *arguments], input=said, capture_output=True, text=True, timeout=SECONDS, cwd=os.getcwd()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def judge(told: Mapping[str, Any]) -> None:
    assert told["metrics"]["accuracy"] > 0.9
    assert told["kinds"][0] == "start"
    assert told["kinds"][-1] == "end"
    assert {"step", "speed", "evaluation", "checkpoint"} <= set(told["kinds"])
    assert told["steps"] == [30, 10]
    ends = [read_events(name)[-1].step for name in ("run", "again", "other")]
    assert ends == [30, 7, 10]


# Where it is called from


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["guarded", "not guarded"])
@pytest.mark.thorough
def test_from_a_script(folder: Path, guarded: bool) -> None:
    body = 'if __name__ == "__main__":\n' + textwrap.indent(TRAIN, "    ") if guarded else TRAIN
    (folder / "script.py").write_text(DEFINITIONS + body)
    told = json.loads(python("script.py"))
    judge(told)
    if guarded:  # its address is known, and importing it trains nothing: the plain module comes out in another process
        code = """
        import json, runpy
        names = runpy.run_path("script.py", run_name="script")
        import apportion
        model = apportion.load("run")
        print(json.dumps([type(model).__name__, model.training, names["accuracy_of"](model)]))
        """
        name, training, accuracy = json.loads(python("-c", textwrap.dedent(code)))
        assert (name, training) == ("Local", False)
        assert accuracy == pytest.approx(told["metrics"]["accuracy"], abs=1e-12)


@pytest.mark.thorough
def test_from_standard_input(folder: Path) -> None:
    code = """
    model = apportion.load("run", model=network)
    assert accuracy_of(model) == end.data["metrics"]["accuracy"]
    try:
        apportion.load("run")
    except ValueError as error:
        assert "model" in str(error), error
    else:
        raise AssertionError("a run without an address cannot make its model")
    """
    judge(json.loads(python("-", said=DEFINITIONS + TRAIN + textwrap.dedent(code))))


NOTEBOOK = """
import __main__, asyncio, sys

import apportion  # what begins so begins warm

assert not hasattr(__main__, "__file__")
cells = [open(name).read() for name in sys.argv[1:]]


async def kernel():
    for number, cell in enumerate(cells):  # what was defined in one is used in the next
        exec(compile(cell, f"<ipython-input-{number}>", "exec"), vars(__main__))


asyncio.new_event_loop().run_until_complete(kernel())  # a notebook's cells run inside an event loop
"""


@pytest.mark.thorough
def test_from_a_notebook_cell_by_cell(folder: Path) -> None:
    changed = TRAIN.replace('"run"', '"run 2"').replace('"again"', '"again 2"').replace('"other"', '"other 2"')
    for number, cell in enumerate((DEFINITIONS, TRAIN, "rate = 0.01\n" + changed)):
        (folder / f"cell{number}").write_text(cell)
    first, _ = map(json.loads, python("-c", NOTEBOOK, "cell0", "cell1", "cell2").splitlines())
    judge(first)
    rates = [next(e.data["learning_rate"] for e in read_events(n) if e.kind == "step") for n in ("run", "run 2")]
    assert rates == [0.02, 0.01], "what a cell has changed reaches the workers"


def test_an_exception_in_a_cell_is_told_with_its_type_and_rank(folder: Path) -> None:
    broken = """
    class Broken(nn.Linear):
        def forward(self, x):
            raise KeyError("no such layer")


    try:
        apportion.train(dataclasses.replace(workload, model=lambda: Broken(8, 2)), "single_device", run_dir="run")
    except apportion.WorkerFailed as error:
        print(json.dumps([str(error), error.rank, error.traceback]))
    """
    (folder / "definitions").write_text(DEFINITIONS)
    (folder / "broken").write_text(textwrap.dedent(broken))
    cause, rank, traceback = json.loads(python("-c", NOTEBOOK, "definitions", "broken"))
    assert "KeyError: 'no such layer'" in cause
    assert rank == 0
    assert re.search(r'File "<ipython-input-1>", line \d+, in forward', traceback)


def test_ctrl_c_in_a_cell_is_a_keyboard_interrupt_that_leaves_a_checkpoint(folder: Path) -> None:
    code = """
    try:
        for event in apportion.run(workload, "single_device", run_dir="run", steps=10_000_000):
            if event.kind == "step":
                print("going", flush=True)
    except KeyboardInterrupt as error:
        print("caught", *getattr(error, "__notes__", []))
    end = apportion.train(workload, "single_device", run_dir="next", steps=3)
    print("next", end.step)
    """
    (folder / "definitions").write_text(DEFINITIONS)
    (folder / "cell").write_text(textwrap.dedent(code))
    command = [sys.executable, "-c", NOTEBOOK, "definitions", "cell"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "caught" in out
    assert out.endswith("next 3\n"), "and the next cell runs"
    assert read_events("run")[-1].data["reason"] == "interrupted"
    assert list((folder / "run" / "checkpoints").glob("step-*"))


# What it gives


def points() -> apportion.Workload:
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    return apportion.Workload(
        model=lambda: nn.Linear(4, 2),
        data=lambda: torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
    )


def test_break_checkpoints_and_stops_every_rank_at_one_step(folder: Path) -> None:
    launcher = apportion.local(workers=2, threads=1)
    for event in apportion.run(points(), "data_parallel", launcher=launcher, run_dir="run", steps=1_000_000):
        if event.kind == "step" and event.step >= 3:
            break
    end = read_events("run")[-1]
    assert (end.kind, end.data["reason"]) == ("end", "stopped")
    state = json.loads((folder / "run" / "checkpoints" / "latest" / "state.json").read_text())
    assert state["step"] == end.step >= 3
    again = apportion.train(
        points(), "single_device", run_dir="run", resume=True, steps=end.step + 5, launcher=apportion.local(workers=1)
    )
    assert again.step == end.step + 5


def test_without_a_strategy_a_plan_is_the_first_event(folder: Path) -> None:
    events = list(apportion.run(points(), run_dir="run"))
    kinds = [event.kind for event in events]
    assert kinds[:2] == ["plan", "start"]
    assert "plan" not in kinds[1:]
    plan, start = events[0].data, events[1].data
    assert (start["strategy"], start["launcher"]) == (plan["strategy"], plan["launcher"])
    assert plan["seconds"] < 60


def test_a_schedule_that_ends_does_not_end_the_trial(folder: Path) -> None:
    job = replace(
        points(),
        steps=5,
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    )
    assert apportion.train(job, run_dir="run").step == 5


def test_a_run_is_a_generator_that_starts_nothing_before_it_is_asked(folder: Path) -> None:
    apportion.run(points(), "single_device", run_dir="run")
    assert not (folder / "run").exists()
