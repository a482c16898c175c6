"""Each verb by the command line: on processes that it starts and on those of torchrun, with a worker that is killed,
and with an answer that is no."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import apportion

Command = Callable[..., subprocess.CompletedProcess[str]]
Furthest = Callable[[Any, Any], float]
SECONDS = 100.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
WORK = """
import os, pathlib, time, torch, apportion
from torch import nn

def rows():
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

class Noted(nn.Module):
    \"\"\"Notes its process, and takes a while for each step.\"\"\"
    def forward(self, x):
        if self.training and os.environ.get("PACE"):
            pathlib.Path(os.environ["PIDS"], os.environ.get("RANK", "0")).write_text(str(os.getpid()))
            time.sleep(float(os.environ["PACE"]))
        return x

def network():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), Noted(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

workload = apportion.Workload(
    model=network, data=rows, loss=nn.functional.cross_entropy, batch_size=24, steps=STEPS, precision="float64", seed=3,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), evaluation=apportion.Evaluation(data=rows))

class Leaky(nn.Module):
    \"\"\"Reads the rank of its process.\"\"\"
    def forward(self, x):
        return x * (1 + 0.01 * int(os.environ.get("RANK", "0")))

by_rank = apportion.Workload(
    model=lambda: nn.Sequential(nn.Linear(6, 8), Leaky(), nn.Linear(8, 3)), data=rows, batch_size=24, steps=12,
    precision="float64", loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with ``work.py``."""
    (tmp_path / "work.py").write_text(WORK.replace("STEPS", "12"))
    return tmp_path


def weights(run_dir: Path) -> dict[str, Tensor]:
    return apportion.load(run_dir, trust=True).state_dict()


def launched(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What a verb does on two ranks that torchrun starts."""
    command = [*TORCHRUN, "-m", "apportion", *words, "--launcher", "env"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["local", "torchrun"])
def test_check_by_the_command_line(elsewhere: bool, project: Path, apportion_command: Command) -> None:
    words = ("check", "work.py:workload", "--strategy", "data_parallel", "--json")
    done = launched(project, *words) if elsewhere else apportion_command(*words, "--workers", "2", cwd=project)
    found = answer(done)
    assert (done.returncode, found["holds"], found["workers"]) == (0, True, 2)
    assert [comparison["verdict"] for comparison in found["rounds"]] == ["equal"] * len(found["rounds"])


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["local", "torchrun"])
def test_compare_by_the_command_line(elsewhere: bool, project: Path, apportion_command: Command) -> None:
    words = ("compare", "work.py:workload", "--strategy", "data_parallel", "--strategy", "tensor_parallel", "--json")
    words = (*words, "--steps", "10")
    done = launched(project, *words) if elsewhere else apportion_command(*words, "--workers", "2", cwd=project)
    found = answer(done)
    assert done.returncode == 0
    workers = {row["strategy"].partition("(")[0]: row["workers"] for row in found}
    assert workers == {"single_device": 1, "data_parallel": 2, "tensor_parallel": 2}
    assert all(row["step_seconds"] > 0 for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["local", "torchrun"])
def test_plan_by_the_command_line(elsewhere: bool, project: Path, apportion_command: Command) -> None:
    words = ("plan", "work.py:workload", "--json", "--no-trial")
    found = answer(launched(project, *words) if elsewhere else apportion_command(*words, cwd=project))
    assert found["strategy"]
    assert found["step_seconds"] > 0
    assert found["because"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "fully_sharded(min_num_params=100)", None])
def test_train_on_the_ranks_of_torchrun_trains_what_local_workers_do(
    strategy: str | None, project: Path, apportion_command: Command, furthest: Furthest
) -> None:
    named = () if strategy is None else ("--strategy", strategy)
    done = launched(project, "train", "work.py:workload", "--run-dir", "there", *named)
    assert done.returncode == 0, done.stderr
    here = apportion_command("train", "work.py:workload", "data_parallel", "--workers", "2", "--run-dir", "here")
    assert here.returncode == 0, here.stderr
    assert furthest(weights(project / "there"), weights(project / "here")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["local", "torchrun"])
def test_a_network_that_reads_its_rank_is_found_and_not_trained(
    elsewhere: bool, project: Path, apportion_command: Command
) -> None:
    words = ("train", "work.py:by_rank", "--run-dir", "run", "--strategy", "data_parallel")
    done = launched(project, *words) if elsewhere else apportion_command(*words, "--workers", "2", cwd=project)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert not list((project / "run").glob("checkpoints/step-*"))


@pytest.mark.slow
def test_ranks_that_were_given_different_rates_are_refused_with_both(project: Path) -> None:
    text = (project / "work.py").read_text().replace("lr=0.05, m", "lr=0.05 * (1 + int(os.environ['RANK'])), m")
    (project / "work.py").write_text(text)
    done = launched(project, "train", "work.py:workload", "--run-dir", "run", "--strategy", "data_parallel")
    assert done.returncode != 0
    assert "0.05" in done.stderr
    assert "0.1" in done.stderr


@contextmanager
def training(project: Path, strategy: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of two workers that note their processes in a folder."""
    pids = project / "pids"
    pids.mkdir(exist_ok=True)
    given = ["train", "work.py:workload", strategy, "--workers", "2", "--run-dir", "run", "--no-check", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "apportion", *given],
        cwd=project,
        env={**os.environ, "PACE": "0.05", "PIDS": str(pids)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process, pids
    finally:
        process.kill()
        process.communicate()


def events(project: Path) -> list[dict[str, Any]]:
    path = project / "run" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(project: Path) -> None:
    """Waits until the run makes steps: processes that look at the network before it are not its workers."""
    end = time.monotonic() + SECONDS
    while not any(event["kind"] == "step" and event["step"] > 2 for event in events(project)):
        assert time.monotonic() < end, "no steps"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel", "local_sgd(every=2)"])
def test_a_worker_that_is_killed_is_replaced_and_the_run_ends_as_it_would(
    strategy: str, project: Path, furthest: Furthest
) -> None:
    (project / "work.py").write_text(WORK.replace("STEPS", "40"))
    with training(project, strategy) as (process, pids):
        wait_for_steps(project)
        os.kill(int((pids / "1").read_text()), signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    found = events(project)
    assert any(event["kind"] == "fault" for event in found)
    assert (found[-1]["kind"], found[-1]["step"]) == ("end", 40)
    if not strategy.startswith("local"):
        apportion.train(
            f"{project / 'work.py'}:workload", "single_device", run_dir=project / "alone", check=False, steps=40
        )
        assert furthest(weights(project / "run"), weights(project / "alone")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_is_saved_and_goes_on(
    number: int, status: int, project: Path, apportion_command: Command, furthest: Furthest
) -> None:
    (project / "work.py").write_text(WORK.replace("STEPS", "40"))
    with training(project, "data_parallel") as (process, _):
        wait_for_steps(project)
        process.send_signal(number)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == status, output
    done = apportion_command("train", "work.py:workload", "data_parallel", "--run-dir", "run", "--resume", cwd=project)
    assert done.returncode == 0, done.stderr
    apportion.train(f"{project / 'work.py'}:workload", "single_device", run_dir=project / "alone", check=False)
    assert furthest(weights(project / "run"), weights(project / "alone")) < 1e-9


@pytest.mark.slow
def test_what_was_trained_is_exported_and_answers_as_the_network_does(
    project: Path, apportion_command: Command
) -> None:
    assert apportion_command("train", "work.py:workload", "single_device", "--run-dir", "run").returncode == 0
    done = apportion_command("export", "run", "--target", "onnx", "--out", "net.onnx")
    assert done.returncode == 0, done.stderr
    onnxruntime = pytest.importorskip("onnxruntime")
    inputs = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    network = apportion.load(project / "run", trust=True).eval()
    session = onnxruntime.InferenceSession(project / "net.onnx")
    given = session.get_inputs()[0]
    values = inputs.numpy().astype("float64" if "double" in given.type else "float32")
    found = torch.from_numpy(session.run(None, {given.name: values})[0])
    assert (found.double() - network.double()(inputs)).abs().max() < 1e-5
