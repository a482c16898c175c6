"""The command line: its flags, what it says on a terminal and without one, and how it ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from commands import at_terminal

from apportion.api.compare import ComparedRow
from apportion.api.comparison import show_rows
from apportion.api.train import run
from apportion.cli.app import app
from apportion.core.event import Event
from apportion.reporting.journal import read_events
from apportion.reporting.progress.plain_lines import plan_line

pytestmark = pytest.mark.processes

APPORTION = (sys.executable, "-c", "from apportion.cli.app import main; main()")
FLAGS = {
    "train": [
        "--allow-approximate", "--grid", "--help", "--hosts", "--launcher", "--log", "--members", "--no-check",
        "--no-trial", "--policy", "--remeasure", "--reprove", "--require-proof", "--resume", "--run-dir", "--seed",
        "--steps", "--strategy", "--workers",
    ],
    "proofs": ["--help", "--json", "--remove"],
    "check": [
        "--accept", "--help", "--hosts", "--json", "--launcher", "--out", "--reference", "--steps", "--strategy",
        "--then", "--workers", "-m",
    ],
    "compare": ["--help", "--hosts", "--json", "--launcher", "--out", "--steps", "--strategy", "--workers"],
    "plan": [
        "--against", "--allow-approximate", "--cluster", "--help", "--hosts", "--json", "--launcher", "--network",
        "--no-trial", "--out", "--remeasure", "--workers",
    ],
    "serve": [
        "--deadline", "--evaluate", "--help", "--host", "--port", "--quorum", "--replication", "--serving", "--trust",
    ],
    "export": ["--help", "--json", "--out", "--target", "--trust"],
    "predict": ["--batch-size", "--help", "--out", "--trust", "--which"],
    "evaluate": ["--help", "--json", "--trust", "--which"],
}  # fmt: skip
WRITTEN = ("checkpoint", "report", "tensorboard")
TINY = '''
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset
import apportion

print("imported")


class Reads(nn.Linear):
    """Another network on another rank."""

    def forward(self, x):
        return super().forward(x) * (1 + int(os.environ.get("RANK", 0)))


class Breaks(nn.Linear):
    def forward(self, x):
        raise RuntimeError("this layer is broken")


def examples():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Marking(TensorDataset):
    """Shows that a step has begun, and takes its time."""

    def __getitem__(self, index):
        open("step", "w").close()
        time.sleep(0.05)
        return super().__getitem__(index)


def marking():
    return Marking(*examples().tensors)


def of(model, **changed):
    given = dict(
        model=model,
        data=examples,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        batch_size=32,
        epochs=5,
        evaluation=apportion.Evaluation(data=examples),
    )
    return apportion.Workload(**{**given, **changed})


workload = of(lambda: nn.Linear(8, 2))
long = of(lambda: nn.Linear(8, 2), steps=2000)
small = of(lambda: nn.Linear(8, 2), batch_size=1, steps=5)


class Rests(nn.Linear):
    """A run of these is long enough to measure something first."""

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


resting = of(lambda: Rests(8, 2))
resting_small = of(lambda: Rests(8, 2), batch_size=1)
reads_rank = of(lambda: Reads(8, 2))
broken = of(lambda: Breaks(8, 2))
slow = of(lambda: nn.Linear(8, 2), data=marking)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tiny.py is, and where the command runs."""
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def apportion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command in this process; what it prints, and its exit status."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def call(*arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == status, (result.output, result.exception)
        return result

    return call


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run([*APPORTION, *arguments], capture_output=True, text=True, timeout=90)


def screen(arguments: tuple[str, ...], *, columns: int = 80, seconds: float = 90) -> str:
    """What the command writes on a terminal, without its colours and movements; it has to end with exit status 0."""
    process, terminal = at_terminal(arguments, TERM="xterm-256color", COLUMNS=str(columns), LINES="40")
    written, deadline = b"", time.monotonic() + seconds
    try:
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # how a terminal says that the other side is gone
                break
            if not part:
                break
            written += part
        else:
            process.kill()
    finally:
        os.close(terminal)
        status = process.wait()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r", "\n")
    assert status == 0, text
    return text


def words(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


# What can be asked


def test_the_flags_of_every_verb_are_these() -> None:
    group = app
    found = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        found[name] = ["--help", *(o for p in command.params if p.param_type_name == "option" for o in p.opts)]
    assert {name: sorted(options) for name, options in found.items()} == FLAGS


@pytest.mark.parametrize("verb", FLAGS)
def test_help_says_what_a_verb_does_and_names_every_flag(apportion: Any, verb: str) -> None:
    text = words(apportion(verb, "--help").output)
    assert {"serve": "MEMBER...", "export": "RUN", "predict": "RUN", "evaluate": "RUN", "proofs": "--remove"}.get(
        verb, "FILE:NAME"
    ) in text
    assert all(flag in text for flag in FLAGS[verb])
    about = {"train": "Train a workload", "check": "Prove that a training script", "compare": "Measure strategies"}
    about |= {
        "plan": "Say which way to split a workload",
        "serve": "Answer with one net",
        "export": "Carry a trained net",
        "proofs": "List the proofs",
        "predict": "Write what a run",
        "evaluate": "Say how well a run",
    }
    assert about[verb] in text


def test_without_a_verb_it_says_what_there_is() -> None:
    result = CliRunner().invoke(app, [])
    assert all(verb in result.output for verb in FLAGS)


# train


def test_train_says_what_it_does_in_plain_lines_where_there_is_no_terminal(folder: Path) -> None:
    done = program("train", "tiny.py:workload", "--strategy", "single_device", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("single_device on local(workers=1")
    assert "18 parameters, 256 examples, batches of 32, 40 steps" in first
    assert re.search(r"epoch 5\.00  test accuracy 0\.\d{4}", done.stdout)
    assert re.fullmatch(r"test accuracy [01]\.\d{3}", last)
    written = {name: re.search(rf"^{name} +(.*)$", done.stdout, re.MULTILINE)[1] for name in WRITTEN}
    assert all((folder / path).exists() for path in written.values())
    assert "imported" not in done.stdout, "what a worker prints is kept apart"


@pytest.mark.thorough
def test_a_terminal_shows_epoch_speed_loss_time_left_and_each_worker(folder: Path) -> None:
    strategy = ("--strategy", "data_parallel", "--workers", "2")
    text = screen(("train", "tiny.py:long", *strategy, "--run-dir", "run"))
    assert re.search(r"epoch \d+\.\d\d .*\d+/2000 steps +loss \d\.\d{4} +[\d,]+ examples/s +\d:\d\d:\d\d", text)
    for rank in (0, 1):
        assert re.search(rf"worker {rank}: [\d,]+ examples/s, waiting \d+% of the time", text)
    table = text[text.rindex("steps  ") :]
    assert re.search(r"examples/s +[\d,]+", table)
    assert re.search(r"\ntest accuracy [01]\.\d{3}\s*$", table)
    assert "run/report.html" in table


@pytest.mark.usefixtures("reports")
@pytest.mark.thorough
def test_without_a_strategy_a_few_are_tried_and_it_says_what_was_measured_and_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with closing(run("tiny.py:resting", steps=100_000, run_dir="run")) as events:
        plan, start = next(events), next(events)
    assert (plan.kind, start.kind) == ("plan", "start")
    tried = [c for c in plan.data["candidates"] if c["step_seconds"]]
    assert len(tried) >= 2
    times = [1 / c["examples_per_second"] for c in tried]
    assert times == sorted(times)
    assert (start.data["strategy"], start.data["launcher"]) == (plan.data["strategy"], plan.data["launcher"])
    line = plan_line(plan)
    assert line.startswith(f"{plan.data['strategy']} on {plan.data['launcher']}: ")
    assert re.search(r"[\d.]+ ms a step", line)
    others = [c for c in tried if (c["strategy"], c["launcher"]) != (plan.data["strategy"], plan.data["launcher"])]
    assert all(f"{c['strategy']} on {c['launcher']}: " in line for c in others)
    assert "No strategy was given" in (folder / "run" / "report.html").read_text()


@pytest.mark.slow
def test_the_next_run_takes_what_the_first_has_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def planned(**options: Any) -> Event:
        with closing(run("tiny.py:resting", steps=100_000, run_dir="run", **options)) as events:
            return next(events)

    first, second = planned(), planned()
    assert [e.data["remembered"] for e in (first, second)] == [False, True]
    assert second.data["strategy"] == first.data["strategy"]
    assert second.data["why"].endswith("as an earlier run found")
    assert planned(remeasure=True).data["remembered"] is False
    source = (folder / "tiny.py").read_text()
    (folder / "tiny.py").write_text(
        source.replace("resting = of(lambda: Rests(8, 2))", "resting = of(lambda: nn.Sequential(Rests(8, 2)))")
    )
    assert planned().data["remembered"] is False, "it is another network now"


@pytest.mark.thorough
def test_a_run_that_is_short_measures_nothing_else_first(apportion: Any) -> None:
    lines = apportion("train", "tiny.py:workload", "--run-dir", "run").output.splitlines()
    assert lines[0] == "finding out which strategy is fastest here"
    assert re.match(r"single_device on local\(workers=1, threads=\d\): the run takes about \S+ s, too short", lines[1])
    assert [event.kind for event in read_events("run")[:2]] == ["plan", "start"]


@pytest.mark.thorough
def test_what_cannot_run_the_workload_is_left_out_of_the_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with closing(run("tiny.py:resting_small", steps=100_000, run_dir="run")) as events:
        line = plan_line(next(events))
    assert re.match(r"single_device\S* on local\(workers=1, threads=\d\): ", line)
    assert re.search(r"data_parallel on local\(workers=2, threads=\d\): batch_size=1 cannot feed 2 workers", line)


def test_how_to_choose_goes_with_no_strategy(apportion: Any) -> None:
    for flag in ("--no-trial", "--remeasure", "--allow-approximate"):
        output = apportion("train", "tiny.py:workload", "--strategy", "single_device", flag, status=2).output
        assert "say how a strategy is chosen, and single_device is given" in output


def test_with_a_number_of_workers_there_is_nothing_to_try(apportion: Any) -> None:
    output = apportion("train", "tiny.py:workload", "--workers", "2", "--steps", "4", "--run-dir", "run").output
    assert re.search(r"^data_parallel on local\(workers=2, threads=\d+\) \(cpu\)", output, re.MULTILINE)
    assert {event.kind for event in read_events("run")} >= {"start", "end"}
    assert "plan" not in {event.kind for event in read_events("run")}


def test_ctrl_c_during_the_trial_ends_it_with_130(folder: Path, eventually: Any) -> None:
    command = [*APPORTION, "train", "tiny.py:slow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually((folder / "step").exists, within=60, what="the trial has begun")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in out + err
    assert not (folder / "runs").exists()


def test_resume_goes_on_with_the_strategy_of_the_run(apportion: Any) -> None:
    apportion("train", "tiny.py:workload", "--workers", "2", "--steps", "4", "--run-dir", "run")
    output = apportion("train", "tiny.py:workload", "--resume", "--run-dir", "run").output
    assert output.startswith("data_parallel on ")
    assert "resumed at step 4" in output
    assert re.search(r"^steps +40$", output, re.MULTILINE)


# compare


def rows(**changed: Any) -> list[ComparedRow]:
    given: dict[str, Any] = {
        "strategy": "data_parallel(microbatches=2)",
        "launcher": "local(workers=16, threads=12)",
        "workers": 16,
        "threads": 12,
        "step_seconds": 0.0123456,
        "examples_per_second": 1234567.0,
        "times_one_device": 12.34,
        "computing": 1.0,
        "waiting": 1.0,
        "communicating": 1.0,
        "exact": False,
        "held_bytes": 9999 << 20,
        "peak_bytes": 9999 << 20,
        "steps": 50,
        "predicted_seconds": 0.0111111,
    }
    given = {field.name: 1.0 for field in fields(ComparedRow)} | given  # the table does not show every field
    return [ComparedRow(**{**given, **changed}), ComparedRow(**{**given, "strategy": "single_device"})]


def test_the_table_of_compare_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_rows(rows())
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= 80
    assert all(
        part in text for part in ("16 x 12", "12.3", "~11.1", "+11%", "1,234,567", "12.34", "100%", "no", "9,999")
    )
    head = "strategy workers step ms examples/s speed-up compute wait send exact MiB"
    assert words(text.splitlines()[0]) == head


@pytest.mark.thorough
def test_compare_prints_and_saves_a_row_a_strategy(apportion: Any, folder: Path) -> None:
    arguments = ("--strategy", "data_parallel", "--strategy", "data_parallel(microbatches=2)", "--workers", "2")
    output = apportion("compare", "tiny.py:workload", *arguments, "--steps", "6", "--out", "rows.json").output
    saved = json.loads((folder / "rows.json").read_text())
    assert {row["strategy"] for row in saved} == {"single_device", "data_parallel", "data_parallel(microbatches=2)"}
    order = [(not row["exact"], -row["examples_per_second"]) for row in saved]
    assert order == sorted(order)
    for row in saved:
        assert row["computing"] + row["waiting"] + row["communicating"] == pytest.approx(1)
        assert row["exact"] is True
        assert row["peak_bytes"] > row["held_bytes"] > 0
        assert row["steps"] == 6
        assert {"predicted_seconds", "error"} <= row.keys()
        assert row["strategy"].partition("(")[0] in output
    alone = next(row for row in saved if row["strategy"] == "single_device")
    assert alone["times_one_device"] == 1


# check


def test_check_says_what_was_compared_and_that_it_is_the_same_network(apportion: Any) -> None:
    output = apportion(
        "check", "tiny.py:workload", "--strategy", "data_parallel", "--workers", "2", "--steps", "3"
    ).output
    assert output.startswith("data_parallel on 2 workers against one device:\n")
    assert re.search(
        r"float64: equal over 3 steps and \d+ tensors; worst is \S+ after step \d, by \S+, "
        r"\S+ of its own change \(bound",
        output,
    )
    assert output.endswith("the same network in its first steps\n")


def test_check_names_the_difference_and_exits_with_1(apportion: Any) -> None:
    arguments = ("--strategy", "data_parallel", "--workers", "2", "--steps", "2")
    output = apportion("check", "tiny.py:reads_rank", *arguments, status=1).output
    assert re.search(r"float64: DIFFERENT .* worst is \w+/\S+", output)
    assert output.endswith("NOT the same network\n")


# Answers for programs


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("check", "--strategy", "single_device", "--steps", "1"), {"holds", "strategy", "rounds", "by_design"}),
        (("compare", "--strategy", "single_device", "--steps", "2"), {"strategy", "step_seconds", "exact"}),
    ],
    ids=["check", "compare"],
)
def test_json_is_all_there_is_on_standard_output(folder: Path, arguments: tuple[str, ...], keys: set[str]) -> None:
    verb, *options = arguments
    done = program(verb, "tiny.py:workload", *options, "--json")
    assert done.returncode == 0, done.stderr
    answer: Any = json.loads(done.stdout)
    answer = answer[0] if isinstance(answer, list) else answer
    assert isinstance(answer, Mapping)
    assert keys <= set(answer)


# How it ends


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "nowhere.py:workload"), "there is no file nowhere.py"),
        (("train", "tiny.py"), "names no workload: write FILE:NAME"),
        (("train", "tiny.py:workload", "--strategy", "data_paralel"), "did you mean data_parallel?"),
        (("train", "tiny.py:workload", "--strategy", "data_parallel(2)"), "arguments are given by name"),
        (("train", "tiny.py:workload", "--launcher", "local(worker=2)"), "local has no 'worker'"),
        (("train", "tiny.py:workload", "--launcher", "env", "--workers", "2"), "workers=2 goes with local()"),
        (("train", "tiny.py:workload", "--policy", "policy(keep=0)"), "keep=0 must be"),
        (("train", "tiny.py:workload", "--resume"), "needs run_dir"),
        (("train", "tiny.py:workload", "--steps", "0"), "--steps"),
        (("train", "tiny.py:workload", "--faster"), "No such option"),
        (("train", "tiny.py:workload", "data_parallel", "--strategy", "hogwild"), "the strategy is given twice"),
        (("train", "tiny.py:workload", "data_parallel", "--hosts", "a b"), "'a b' is not a valid host: write host,"),
        (("train", "tiny.py:workload", "data_parallel", "--hosts", "a", "--launcher", "env"), "contradict each other"),
        (("check", "tiny.py:workload"), "Missing option '--strategy'"),
        (("check", "tiny.py:workload", "--strategy", "single_device", "--workers", "2"), "runs in one process"),
        (("compare", "tiny.py:workload", "--strategy", "nothing"), "unknown strategy 'nothing'"),
        (("train", "tiny.py:examples", "--strategy", "single_device"), "is a function, not an apportion.Workload"),
        (("train", "tiny.py:small", "--strategy", "data_parallel", "--workers", "2"), "cannot feed 2 workers"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_wrong_use_exits_with_2_and_says_what_is_right(apportion: Any, arguments: tuple[str, ...], told: str) -> None:
    result = apportion(*arguments, status=2)
    assert told in words(result.output)
    assert "Traceback" not in result.output


def test_what_could_not_be_done_exits_with_3_and_the_cause(apportion: Any) -> None:
    result = apportion("train", "tiny.py:broken", "--strategy", "single_device", status=3)
    assert "RuntimeError: this layer is broken" in result.output
    assert 'raise RuntimeError("this layer is broken")' in result.output, "the worker's own traceback"
