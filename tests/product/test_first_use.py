"""What a beginner writes, coming from another library: each mistake is answered with the value, the rule and the
remedy, and a misspelled name before torch is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import apportion

FILE = """
import apportion, torch
from torch.utils.data import TensorDataset

def rows():
    return TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)

workload = apportion.Workload(
    model=lambda: torch.nn.Linear(4, 2), data=rows, loss=torch.nn.functional.cross_entropy,
    optimizer=torch.optim.SGD, batch_size=16,
)

def wrong(outputs, targets):
    return deeper(outputs)

def deeper(outputs):
    raise KeyError("the cause")

raises = apportion.Workload(
    model=lambda: torch.nn.Linear(4, 2), data=rows, loss=wrong, optimizer=torch.optim.SGD, batch_size=16,
)
"""


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)


def given(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": lambda: nn.Linear(4, 2),
        "data": rows,
        "loss": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD,
        "batch_size": 16,
    }
    return {**fields, **changes}


def made(**changes: Any) -> Callable[[], object]:
    return lambda: apportion.Workload(**given(**changes))


def train(*arguments: Any, **options: Any) -> Callable[[], object]:
    return lambda: apportion.train(*arguments, **options)


class Hidden(nn.Linear):
    """A network that needs a size."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 2)


WORKLOAD = apportion.Workload(**given())
NET = nn.Linear(4, 2)

MISTAKES: dict[str, tuple[Callable[[], object], str, str, str]] = {
    # what is done: the value, the rule, the remedy
    "a learning rate": (made(lr=0.1), "lr=", "argument of the optimizer", "optimizer=lambda parameters"),
    "epochs by another name": (made(max_epochs=3), "max_epochs=", "no argument", r"epochs=\?"),
    "a loader": (made(train_loader=1), "train_loader=", "data= is a function", "data=lambda"),
    "a criterion": (made(criterion=1), "criterion=", "no argument", r"loss=\?"),
    "a device": (made(device="cuda"), "device=", "belongs to the launcher", "launcher=apportion.local"),
    "a misspelled field": (made(batchsize=1), "batchsize=", "whole batch", "batch_size="),
    "metrics of the workload": (made(metrics={}), "metrics=", "held-out data", r"apportion.Evaluation\("),
    "accumulation": (made(accumulate_grad_batches=2), "accumulate_grad_batches=", "whole batch", "microbatches"),
    "fields without names": (lambda: apportion.Workload(NET, rows), "2 were given", "by name", "model=..."),
    "a field that is missing": (
        lambda: apportion.Workload(model=Hidden, data=rows, batch_size=3), "optimizer=", "lacks", "optimizer=...",
    ),
    "a network that is made": (made(model=NET), "Linear", "a function", r"model=lambda: Linear\("),
    "a network that needs a size": (made(model=Hidden), "hidden", "without arguments", r"lambda: Hidden\("),
    "a data set that is made": (made(data=rows()), "TensorDataset", "a function that makes", "data=lambda"),
    "a loader as data": (made(data=DataLoader(rows())), "DataLoader", "by index", "batch_size="),
    "a loss by its name": (made(loss="cross_entropy"), "'cross_entropy'", "outputs, targets", "loss=torch"),
    "a class of losses": (made(loss=nn.CrossEntropyLoss), "CrossEntropyLoss", "a class", r"CrossEntropyLoss\(\)"),
    "a loss of one argument": (made(loss=lambda o: 0), "called with 2", "outputs, targets", "loss=torch"),
    "an optimizer by its name": (made(optimizer="adam"), "'adam'", "named parameters", "optimizer=lambda"),
    "an optimizer that is made": (
        made(optimizer=torch.optim.SGD(NET.parameters(), lr=0.1)), r"SGD\(", "named parameters", "optimizer=lambda",
    ),
    "an optimizer of nothing": (made(optimizer=lambda: None), "no|1 arg", "named parameters", "optimizer=lambda"),
    "a schedule of one argument": (made(schedule=lambda adam: adam), "2 arguments", "total steps", "schedule=lambda"),
    "an evaluation as a dict": (
        made(evaluation={"data": rows, "every": 1}), "'data'", "must be an Evaluation", r"Evaluation\(data=..., every",
    ),
    "an evaluation as a list": (made(evaluation=[rows]), r"\[<func", "must be an Evaluation", r"Evaluation\(data="),
    "held-out data that are made": (
        lambda: apportion.Evaluation(data=rows()), "TensorDataset", "a function that makes", "data=lambda",
    ),
    "a metric without its name": (
        lambda: apportion.Evaluation(data=rows, metrics=apportion.accuracy), "accuracy", "a dict", "metrics={",
    ),
    "a metric of one argument": (
        lambda: apportion.Evaluation(data=rows, metrics={"a": lambda o: o}), "'a'", "outputs, targets", "metrics={",
    ),
    "bf16": (made(precision="bf16"), "'bf16'", "must be float32", 'did you mean "bfloat16"'),
    "torch's dtype": (made(precision=torch.float16), "torch.float16", "must be float32", 'mean "float16"'),
    "a batch as text": (made(batch_size="64"), "'64'", "a whole number", "batch_size=64"),
    "epochs as text": (made(epochs="3"), "'3'", "above 0", "epochs=10"),
    "a network in place of a workload": (train(NET), r"Linear\(", "takes a Workload", r"model=lambda: Linear\("),
    "a class in place of a workload": (train(Hidden), "Hidden", "takes a Workload", "model=Hidden"),
    "a dict in place of a workload": (train({"model": 1}), "dict", "takes a Workload", r"apportion.Workload\("),
    "a path in place of a workload": (train(Path("a.py")), "a.py", "as text", "a.py:workload"),
    "ddp": (train(WORKLOAD, "ddp"), "'ddp'", "unknown strategy", "data_parallel"),
    "fsdp": (train(WORKLOAD, "FSDP"), "'FSDP'", "unknown strategy", "fully_sharded"),
    "the class of a strategy": (
        train(WORKLOAD, apportion.data_parallel), "data_parallel", "is the class", r"data_parallel\(\)",
    ),
    "workers of train": (train(WORKLOAD, workers=4), "workers=", "belongs to the launcher", "launcher=apportion.local"),
    "epochs of train": (train(WORKLOAD, max_epochs=4), "max_epochs=", "field of the workload", "epochs=..."),
    "an output folder": (train(WORKLOAD, output_dir="x"), "output_dir=", "no argument", r"run_dir=\?"),
    "a number as the launcher": (train(WORKLOAD, launcher=4), "launcher=4", "must be", r"local\(workers=4\)"),
    "a misspelled launcher": (train(WORKLOAD, launcher="torchrun"), "'torchrun'", "unknown launcher", "env"),
    "processes of local": (lambda: apportion.local(nproc=2), "nproc=", "no argument", r"workers=\?"),
    "a dict as the policy": (train(WORKLOAD, policy={"keep": 3}), "'keep': 3", "must be a policy", r"Policy\(keep=3\)"),
    "a run directory without a name": (train(WORKLOAD, run_dir=""), "''", "path of a folder", "run_dir='runs"),
    "resuming nothing": (train(WORKLOAD, resume=True), "resume=True", "needs run_dir", "directory of the run"),
    "a rate in capitals": (made(LR=0.1), "LR=", "argument of the optimizer", r"lr=0.1\)$"),
    "a rate in two words": (made(learningRate=0.1), "learningRate=", "argument of the optimizer", r"lr=0.1\)$"),
    "metrics in capitals": (made(Metrics={}), "Metrics=", "held-out data", r"metrics={...}\)$"),
    "a batch of numpy": (made(batch_size=np.int64(16)), "np.int64", "a whole number", "batch_size=16"),
    "epochs of numpy": (made(epochs=np.float32(2)), "np.float32", "a number above 0", "epochs=2.0"),
    "a strategy with a hyphen": (train(WORKLOAD, "data-parallel"), "'data-parallel'", "a name", "mean data_parallel"),
    "a launcher that does not parse": (
        train(WORKLOAD, launcher="local workers=2"), "'local workers=2'", "does not parse", r"like local\(workers=2\)",
    ),
    "a policy that does not parse": (
        train(WORKLOAD, policy="keep=3"), "'keep=3'", "does not parse", r"like policy\(keep=3\)",
    ),
    "one of two for a truth": (train(WORKLOAD, check="no"), "check='no'", "True or False", "check=False"),
    "one step of train": (train(WORKLOAD, step=3), "step=", "no argument", r"mean steps=\?"),
    "nothing to train": (lambda: apportion.train(), r"train\(\)", "workload=", r"train\(workload"),  # type: ignore
    "a directory without its name": (
        lambda: apportion.train(WORKLOAD, "single_device", "out"), "3", "by name", r"run_dir=",  # type: ignore
    ),
    "nothing to check": (lambda: apportion.check(WORKLOAD), r"check\(\)", "strategy=", "check"),  # type: ignore
    "steps as text": (
        lambda: apportion.check(WORKLOAD, "single_device", steps="8"),  # type: ignore
        "steps='8'", "a whole number", "steps=8",
    ),
    "epochs of check": (
        lambda: apportion.check(WORKLOAD, "single_device", epochs=2),  # type: ignore
        "epochs=", "field of the workload", r"mean|dataclasses.replace\(workload, epochs=...\)$",
    ),
    "one strategy to compare": (
        lambda: apportion.compare(WORKLOAD, strategy="ddp"), "strategy=", "no argument", r"mean strategies=\?",  # type: ignore
    ),
    "strategies to plan": (
        lambda: apportion.plan(WORKLOAD, strategies=["ddp"]), "strategies=", "all strategies", "compare",  # type: ignore
    ),
    "a number as a run": (lambda: apportion.load(3), "3", "the path of a folder", "load"),  # type: ignore
    "a network that is made, to load": (
        lambda: apportion.load("runs/none", model=NET), r"Linear\(", "a function", r"model=lambda: Linear\(",  # type: ignore
    ),
    "a text for trust": (lambda: apportion.load("runs/none", trust="no"), "'no'", "True or False", "trust=False"),  # type: ignore
    "a number as a member": (lambda: apportion.serve([3]), "3", "path", r"serve\("),  # type: ignore
    "one member by itself": (lambda: apportion.serve("nowhere"), "m1", "there is no nowhere", "no"),
    "a port of serve": (lambda: apportion.serve("nowhere", Port=3), "Port=", "no argument", "serving"),  # type: ignore
    "a number as a host": (lambda: apportion.ssh("a", 4), "4", "text", r"ssh\("),  # type: ignore
    "a truth as a number": (lambda: apportion.data_parallel(microbatches=True), "True", "whole number", "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_the_value_the_rule_and_the_remedy(mistake: str) -> None:
    make, value, rule, remedy = MISTAKES[mistake]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (what it says is looked at)
        make()
    message = str(raised.value)
    for part in (value, rule, remedy):
        assert re.search(part, message), f"{part!r} is not in: {message}"
    assert not re.search(r"--[a-z]", message), "a flag, and this is Python"


BEFORE_A_STEP: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "an optimizer of the network": (
        {"optimizer": lambda net: torch.optim.SGD(net.parameters())}, "parameters", "given the named parameters",
        "optimizer=lambda parameters",
    ),
    "an optimizer without return": ({"optimizer": lambda p: None}, "None", "must return", "optimizer=lambda"),
    "a schedule without return": ({"schedule": lambda o, n: None}, "None", "must return", "schedule=lambda optimizer"),
    "a network without return": ({"model": lambda: None}, "None", "must return", "model=lambda"),
    "a loader that is returned": ({"data": lambda: DataLoader(rows())}, "DataLoader", "__getitem__", "its data set"),
    "a loss of rows": ({"loss": nn.CrossEntropyLoss(reduction="none")}, "16,", "one number", 'reduction="mean"'),
    "a loss as a float": ({"loss": lambda o, t: o.mean().item()}, "float", "one number", r"leave .item\(\)"),
    "a loss without gradient": ({"loss": lambda o, t: o.mean().detach()}, "the loss", "needs one", r"leave detach\(\)"),
    "an empty data set": ({"data": lambda: TensorDataset(torch.zeros(0))}, "empty", "at least one", "check the path"),
}  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(name, marks=() if name == "an optimizer of the network" else pytest.mark.thorough)
        for name in BEFORE_A_STEP
    ],
)
def test_a_mistake_that_only_a_worker_sees_is_answered_too(mistake: str, trained: Any) -> None:
    changes, value, rule, remedy = BEFORE_A_STEP[mistake]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (what it says is looked at)
        trained(apportion.Workload(**given(**changes)))
    for part in (value, rule, remedy):
        assert re.search(part, str(raised.value)), f"{part!r} is not in: {raised.value}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("first")
    (made / "mine.py").write_text(FILE)
    return made


NAMES = {
    "a file": (("train", "mne.py:workload"), "mne.py", "there is no file", "mine.py"),
    "a name": (("train", "mine.py:worklod"), "worklod", "is not there", "did you mean workload"),
    "a file in capitals": (("train", "MINE.py:workload"), "MINE.py", "there is no file", "did you mean mine.py"),
    "a name in capitals": (("train", "mine.py:WORKLOAD"), "WORKLOAD", "is not there", "did you mean workload"),
    "a strategy with a hyphen": (
        ("train", "mine.py:workload", "data-parallel"), "data-parallel", "must be a name", "did you mean data_parallel",
    ),
    "no name": (("check", "mine.py", "--strategy", "data_parallel"), "mine.py", "FILE:NAME", "mine.py:NAME"),
    "a module": (("compare", "mines:workload"), "mines", "there is no module", "file.py:name"),
    "a strategy": (("train", "mine.py:workload", "data_paralel"), "data_paralel", "unknown", "data_parallel"),
    "a strategy of another library": (("train", "mine.py:workload", "fsdp"), "fsdp", "unknown", "fully_sharded"),
    "a field of a strategy": (
        ("check", "mine.py:workload", "--strategy", "data_parallel(microbatch=2)"), "microbatch'", "has no",
        "microbatches=",
    ),
    "a launcher": (("plan", "mine.py:workload", "--launcher", "envv"), "envv", "unknown launcher", "env"),
    "a field of the policy": (("train", "mine.py:workload", "--policy", "policy(kep=3)"), "kep", "has no", "keep="),
    "a target": (("export", "runs/a", "--target", "onx"), "onx", "unknown target", "onnx"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("a name", "a strategy of another library") else pytest.mark.thorough)
        for name in NAMES
    ],
)
def test_a_misspelled_name_is_reported_before_torch_is_imported(name: str, folder: Path) -> None:
    """In half a second of processor time, which a busy machine does not stretch."""
    words, value, rule, remedy = NAMES[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "apportion", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time")}
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time")]
    assert ended.returncode == 2, lines
    assert "apportion.cli.app" in imported
    assert "torch" not in imported
    for part in (value, rule, remedy):
        assert re.search(part, lines[-1]), f"{part!r} is not in: {lines}"
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
        or "PYTHONDONTWRITEBYTECODE" in os.environ
    )


NOT_MISSPELLED = {
    "imported": "from elsewhere import workload",
    "starred": "from elsewhere import *",
    "in a branch": "if True:\n    workload = 1",
    "unpacked": "other, (workload, last) = made()",
    "by a function": "def make():\n    global workload\n    workload = 1\nmake()",
    "by its text": "globals()['work' + 'load'] = 1",
    "on demand": "def __getattr__(name):\n    return made(name)",
    "as a loop": "for workload in made(): pass",
    "in a match": "match made():\n    case {'a': workload}: pass",
    "walrus": "print(workload := made())",
    "with": "with made() as workload: pass",
    "not Python": "this does not parse",
}


@pytest.mark.parametrize("way", NOT_MISSPELLED)
def test_a_name_that_a_file_may_define_is_not_taken_for_misspelled(way: str, tmp_path: Path) -> None:
    """The file is only read; it is imported by a worker, which says what is wrong with it."""
    (tmp_path / "other.py").write_text(NOT_MISSPELLED[way])
    events = apportion.run(f"{tmp_path}/other.py:workload", "single_device", run_dir=tmp_path / "run")
    events.close()


def test_values_are_written_in_python_as_on_the_command_line(tmp_path: Path) -> None:
    result = apportion.train(
        WORKLOAD, "single_device()", launcher="local(workers=1)", policy="policy(keep=3)", run_dir=tmp_path / "run"
    )
    assert result.step == 4
    with pytest.raises(ValueError, match=r"policy has no 'kep': did you mean keep=\?"):
        apportion.train(WORKLOAD, policy="policy(kep=3)")


def impossible(tmp_path: Path) -> Iterator[tuple[Path | str, str]]:
    yield "/proc/x", "no folder can be made in /proc"
    yield "/proc/x/y", "no folder can be made in /proc"
    dangling = tmp_path / "dangling"
    dangling.symlink_to("nowhere")
    yield dangling, "is a link to nowhere, which is not there"
    yield dangling / "run", "is a link to nowhere, which is not there"
    (tmp_path / "file").touch()
    yield tmp_path / "file", "is not a folder"
    yield tmp_path / "file" / "run", "is not a folder"
    yield tmp_path / ("a" * 300), "too long"


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    for run_dir, why in impossible(tmp_path):
        with pytest.raises(apportion.CheckpointError, match=f"cannot be written: .*{why}.*use another run_dir="):
            apportion.train(WORKLOAD, "single_device", run_dir=run_dir)


def test_a_batch_of_more_examples_than_there_are_is_reported(tmp_path: Path) -> None:
    larger = dataclasses.replace(WORKLOAD, batch_size=1000, epochs=2)
    events = list(apportion.run(larger, "single_device", launcher="local(workers=1)", run_dir=tmp_path / "run"))
    start = next(event for event in events if event.kind == "start")
    assert (start.batch_size, start.examples, start.steps) == (64, 64, 2)
    fault = next(event for event in events if event.kind == "fault")
    assert re.search(r"batch_size=1000 is more than the 64 examples .* use batch_size<=64", fault.cause)
    assert fault.action == "goes on"
    again = apportion.run(WORKLOAD, "single_device", launcher="local(workers=1)", run_dir=tmp_path / "other")
    assert not [event for event in again if event.kind == "fault"]


def lines_of_an_error(folder: Path, command: Any, **env: str) -> list[str]:
    words = ("train", "mine.py:raises", "--strategy", "single_device", "--run-dir", f"raised-{len(env)}")
    ended = command(*words, cwd=folder, env=env)
    assert ended.returncode == 3
    return [line for line in ended.stderr.splitlines() if line]


def test_the_explanation_comes_before_the_traceback_which_has_no_frames_of_the_package(
    folder: Path, apportion_command: Any
) -> None:
    lines = lines_of_an_error(folder, apportion_command)
    assert re.match(r"error: rank 0: KeyError: 'the cause'", lines[0])
    assert re.match(r"  at .*mine.py:\d+ in deeper: raise KeyError", lines[1])
    assert [line.strip() for line in lines].count("Traceback (most recent call last):") == 1
    assert not any("apportion/parallel" in line or "apportion/runtime" in line for line in lines)


@pytest.mark.thorough
def test_frames_of_the_package_are_shown_where_they_are_asked_for(folder: Path, apportion_command: Any) -> None:
    lines = lines_of_an_error(folder, apportion_command, APPORTION_TRACEBACK="full")
    assert lines[0].startswith("error: rank 0: KeyError: 'the cause'")
    assert any("apportion/parallel" in line for line in lines)


@pytest.mark.thorough
def test_an_error_in_python_shows_the_line_of_the_user_alone(folder: Path) -> None:
    script = """
    import apportion, mine
    try:
        apportion.train(mine.raises, "single_device", run_dir="python")
    except apportion.WorkerFailed as error:
        import traceback
        shown = "".join(traceback.format_exception(error))
        assert shown.index("KeyError: 'the cause'") < shown.index("own traceback"), shown
        assert "apportion/runtime" not in shown and "apportion/api" not in shown, shown
        assert "--" not in str(error), error
        print("as it should")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert ended.stdout.strip() == "as it should", ended.stderr


@pytest.mark.thorough
def test_what_python_calls_an_argument_is_a_flag_on_the_command_line(folder: Path, apportion_command: Any) -> None:
    with pytest.raises(apportion.CheckpointError, match="use another run_dir="):
        apportion.train(WORKLOAD, "single_device", run_dir="/proc/x")
    ended = apportion_command(
        "train", "mine.py:workload", "--strategy", "single_device", "--run-dir", "/proc/x", cwd=folder
    )
    assert ended.returncode == 3
    assert ended.stderr.strip().endswith("use another --run-dir")


@pytest.mark.thorough
def test_the_export_of_ones_own_run_in_ones_own_folder_needs_no_trust(folder: Path, apportion_command: Any) -> None:
    trained = apportion_command("train", "mine.py:workload", "single_device", "--run-dir", "own", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    (folder / "mine.py").chmod(0o666)
    refused = apportion_command("export", "own", "--target", "stablehlo", cwd=folder)
    assert refused.returncode == 2
    assert "others may write to" in refused.stderr
    assert "say --trust if it may run" in refused.stderr
    (folder / "mine.py").chmod(0o644)
    exported = apportion_command("export", "own", "--target", "stablehlo", cwd=folder)
    assert "which is not run" not in exported.stderr


class Slower(Dataset[Any]):
    """Rows that are read fast at first, and then slowly."""

    def __init__(self, fast: float = 0.0, slow: float = 0.005) -> None:
        self.read, self.fast, self.slow = 0, fast, slow

    def __len__(self) -> int:
        return 2560

    def __getitem__(self, row: int) -> Any:
        import time

        self.read += 1
        time.sleep(self.slow if self.read > 800 else self.fast)
        return torch.full((4,), row / 2560), row % 2


def test_steps_that_take_ten_times_as_long_are_reported_in_a_run_too_short_for_a_trial(
    tmp_path: Path, no_cached_proofs: Path
) -> None:
    slower = dataclasses.replace(WORKLOAD, data=Slower)
    kinds: dict[str, Any] = {}
    for event in apportion.run(slower, run_dir=tmp_path / "run"):
        kinds.setdefault(event.kind, event)
        if event.kind == "drift":  # it is reported while the run goes on
            break
    assert "too short" in kinds["plan"].why
    assert kinds["drift"].ratio >= 10
    assert "loading data" in kinds["drift"].cause


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["local(workers=1)", "env"])
def test_steps_that_take_ten_times_as_long_as_before_are_reported_where_a_strategy_is_named(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher == "env":
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}.items():
            monkeypatch.setenv(name, value)
    slower = dataclasses.replace(WORKLOAD, data=lambda: Slower(0.001, 0.02))
    events = apportion.run(slower, "single_device", launcher=launcher, run_dir=tmp_path / "run")
    drift = next((event for event in events if event.kind == "drift"), None)
    events.close()
    assert drift is not None
    assert "of steps before" in drift.cause
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert any(json.loads(line)["kind"] == "drift" for line in lines)


def test_a_worker_has_at_most_the_threads_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = apportion.local()
    for text, most in (("1", 1), ("1,2", 1), ("64", None), ("", None), ("none", None), ("0", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        cores = len(os.sched_getaffinity(0))
        assert launcher.threads_each(1) <= (most or cores)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert apportion.local(threads=3).threads_each(1) == 3


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Other programs have all cores, twice over."""
    spin = [sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]
    others = [subprocess.Popen(spin) for _ in range(2 * len(os.sched_getaffinity(0)))]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.thorough
@pytest.mark.usefixtures("busy_cores", "no_cached_proofs")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has one thread in any case")
def test_where_other_programs_have_the_cores_fewer_threads_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    wide = dataclasses.replace(
        WORKLOAD,
        model=lambda: nn.Sequential(
            nn.Linear(4, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2)
        ),
        steps=20,
    )
    events = apportion.run(wide, run_dir=tmp_path / "run")
    plan = next(event for event in events if event.kind == "plan")
    events.close()
    assert "other programs had the cores" in plan.why
    assert plan.launcher == "local(workers=1, threads=1)"


def test_what_comes_before_the_first_step_is_counted_once_and_by_itself(tmp_path: Path, no_cached_proofs: Path) -> None:
    import time

    def slow_to_open() -> TensorDataset:
        time.sleep(0.7)
        return rows()

    workload = dataclasses.replace(WORKLOAD, data=slow_to_open)
    began = time.monotonic()
    apportion.train(workload, "data_parallel", launcher="local(workers=2, threads=1)", run_dir=tmp_path / "run")
    took = time.monotonic() - began
    page = (tmp_path / "run" / "report.html").read_text()
    found = re.search(r"([0-9.]+) s of training after ([0-9.]+) s of preparation", page)
    assert found is not None
    training, preparing = map(float, found.groups())
    assert preparing > 1.0, "the data are opened by each worker, and by those of the proof"
    assert training + preparing <= took + 0.2
