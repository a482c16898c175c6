"""SIGTERM is the notice to end: the last update is saved, everything ends, and the same command goes on.

Real processes and real signals, of a driver on this host and of ranks that torchrun has started. Several hosts are in
``test_notice_across_hosts.py`` and ``tests/runtime/test_notice_in_slurm.py``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Eventually, Within
from safetensors.torch import load_file
from warm_python import FORKER

from apportion import Policy
from apportion.api.train import run, train
from apportion.errors import ToldToEnd
from apportion.reporting.journal import read_events
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import template

WORKLOADS = Path(__file__).parents[1] / "helpers" / "fault_workloads.py"
GOOD = f"{WORKLOADS}:good"
PROGRAM = Path(sys.executable).with_name("apportion")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TWO = Local(workers=2, threads=1)
TOLD = 128 + signal.SIGTERM
SECONDS = 5.0
START_SECONDS = 60.0
"""For a cold start on a busy machine."""
RANK = """
import os
import sys

import apportion

if __name__ == "__main__":
    with open(f"pid-{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    launcher = apportion.env(device="cpu", loaders=int(sys.argv[2]))
    apportion.train(sys.argv[1], "data_parallel", launcher=launcher, run_dir="run", resume="auto", check=False)
"""
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """``start(command)`` starts a program in a folder of this test's own; none goes on afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FAULT_PACE", "0.05")
    (tmp_path / "rank.py").write_text(RANK)
    started: list[subprocess.Popen[str]] = []

    def call(*command: Any, **environment: str) -> subprocess.Popen[str]:
        words = [str(word) for word in command]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The final state of a run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(GOOD, "data_parallel", launcher=TWO, run_dir=run_dir, check=False)
    return final_state(run_dir)


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / "latest"
    files = [folder / f"{part}.safetensors" for part in ("model", "optimizer")]
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(run_dir: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = final_state(run_dir)
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def saved_step(run_dir: Path) -> int:
    return int(json.loads((run_dir / "checkpoints" / "latest" / "state.json").read_text())["step"])


def makes_steps(run_dir: Path, process: subprocess.Popen[str], eventually: Eventually) -> None:
    """Waits until a run makes steps."""
    events = run_dir / "events.jsonl"

    def steps() -> bool:
        assert process.poll() is None, process.communicate()
        return events.exists() and '"kind":"step"' in events.read_text()

    eventually(steps, within=START_SECONDS, what="it trains")


def told_to_end(process: subprocess.Popen[str], pid: int) -> tuple[float, int, str]:
    """Sends SIGTERM; returns the seconds until everything has ended, the exit status and the error output."""
    parents = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    everything = [one for one in parents if one.name() != FORKER]
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    _, err = process.communicate(timeout=START_SECONDS)
    psutil.wait_procs(everything, timeout=START_SECONDS)
    return time.monotonic() - began, process.returncode, err


@pytest.mark.thorough
def test_sigterm_to_a_driver_saves_and_what_it_says_goes_on_to_the_same_bits(
    start: Start, tmp_path: Path, undisturbed: dict[str, torch.Tensor], eventually: Eventually
) -> None:
    train_it = ("train", GOOD, "--strategy", "data_parallel", "--launcher", TWO, "--no-check", "--run-dir", "run")
    process = start(sys.executable, PROGRAM, *train_it)
    makes_steps(tmp_path / "run", process, eventually)
    took, status, err = told_to_end(process, process.pid)
    print(f"{took:.2f} s from SIGTERM to the end of everything")
    assert status == TOLD, err
    assert took < SECONDS
    saved, resume = err.splitlines()[-2:]
    assert saved == f"told to end by SIGTERM; step {saved_step(tmp_path / 'run')} is saved"
    assert "Traceback" not in err
    assert read_events(tmp_path / "run")[-1].data["reason"] == "interrupted"
    words = shlex.split(resume.removeprefix("go on with: "))
    process = start(sys.executable, PROGRAM, *words[1:], "--no-check", FAULT_PACE="0")
    _, err = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0, err
    assert_same_bits(tmp_path / "run", undisturbed)


@pytest.mark.thorough
def test_sigterm_before_the_first_step_ends_a_driver_with_nothing_written(
    start: Start, tmp_path: Path, eventually: Eventually
) -> None:
    given = ("--strategy", "data_parallel", "--launcher", TWO, "--no-check", "--run-dir", "run")
    process = start(sys.executable, PROGRAM, "train", f"{WORKLOADS}:hangs", *given, FAULT_STEP="1")
    eventually(lambda: (tmp_path / "run").exists(), within=START_SECONDS, what="the run has begun")
    _, status, err = told_to_end(process, process.pid)
    assert status in (TOLD, -signal.SIGTERM), err


@pytest.fixture
def sigterm_by_default() -> Iterator[None]:
    """No handler of SIGTERM, such as a command that ran in this process has left."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_by_default")
@pytest.mark.parametrize("place", ["in the run", "in the body of the loop"])
def test_a_program_that_loops_over_the_events_is_left_with_status_143_and_is_told_why(
    place: str, tmp_path: Path, within: Within, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_PACE", "0.05")
    template().wait_ready()
    going = run(GOOD, "data_parallel", launcher=TWO, run_dir=tmp_path / "run", check=False)

    def loop() -> None:
        for event in going:
            if event.kind == "start" and place == "in the run":
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            elif event.kind == "step" and place == "in the body of the loop":
                signal.raise_signal(signal.SIGTERM)

    with within(2 * SECONDS, "the notice"), pytest.raises(ToldToEnd) as told:
        loop()
    assert told.value.code == TOLD
    going.close()
    text = capfd.readouterr().err
    assert f"told to end by SIGTERM; step {saved_step(tmp_path / 'run')} is saved\ngo on with: resume=True" in text
    assert told.value.__notes__[0] in text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert read_events(tmp_path / "run")[-1].data["reason"] == "interrupted"


def test_a_handler_of_the_programs_own_is_not_touched(tmp_path: Path) -> None:
    heard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGTERM)
    try:
        for event in run(GOOD, "data_parallel", launcher=TWO, run_dir=tmp_path / "run", check=False):
            if event.kind == "start":
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert event.data["reason"] == "finished"


def test_requeue_is_refused_where_there_is_no_job_of_slurms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match=r"requeue=True\) has Slurm requeue the job .* SLURM_JOB_ID is not set here"):
        train(GOOD, "data_parallel", launcher=TWO, run_dir=tmp_path / "run", policy=Policy(requeue=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "who", [pytest.param("torchrun", marks=pytest.mark.slow), pytest.param("rank 0", marks=pytest.mark.slow), "rank 1"]
)
@pytest.mark.thorough
def test_ranks_of_torchrun_stop_at_one_step_save_once_and_the_same_command_goes_on(
    who: str, start: Start, tmp_path: Path, undisturbed: dict[str, torch.Tensor], eventually: Eventually
) -> None:
    loaders = 1 if who == "torchrun" else 0  # torchrun signals the processes of a rank, too
    process = start(*TORCHRUN, "rank.py", GOOD, loaders)
    makes_steps(tmp_path / "run", process, eventually)
    pid = process.pid if who == "torchrun" else int((tmp_path / f"pid-{who[-1]}").read_text())
    took, status, err = told_to_end(process, pid)
    print(f"{took:.2f} s from SIGTERM to {who} to the end of everything")
    assert status != 0, err
    assert took < SECONDS
    step = saved_step(tmp_path / "run")
    assert err.count(f"told to end by SIGTERM; step {step} is saved\ngo on with: resume=True") == 1, err
    last = read_events(tmp_path / "run")[-1]
    assert (last.kind, last.step, last.data["reason"]) == ("end", step, "interrupted")
    process = start(*TORCHRUN, "rank.py", GOOD, loaders, FAULT_PACE="0")
    _, err = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0, err
    assert_same_bits(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_not_waited_for_where_rank_0_has_the_last_update(
    start: Start, tmp_path: Path, eventually: Eventually
) -> None:
    mark = tmp_path / "mark"
    process = start(*TORCHRUN, "rank.py", f"{WORKLOADS}:hangs", 0, FAULT_MARK=str(mark), FAULT_STEP="6", FAULT_RANK="0")
    eventually(mark.exists, within=START_SECONDS, what="the step that never ends")
    took, status, err = told_to_end(process, process.pid)
    print(f"{took:.2f} s from SIGTERM to the end of everything")
    assert status != 0, err
    assert took < SECONDS
    assert "told to end by SIGTERM; step 5 is saved" in err
    assert saved_step(tmp_path / "run") == 5
