"""The notice to end in a job of Slurm's: SIGUSR1 before its end, SIGTERM at it, and a job that requeues itself. A real
cluster of two nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import SECONDS
from conftest import Eventually
from launched_drivers import await_steps
from launched_runs import MINE
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.serial, pytest.mark.timeout(300)]

TWO_NODES = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
TRAIN = (sys.executable, "-m", "apportion", "train", "mine.py:endless", "--strategy", "data_parallel", "--no-check")
BATCH = """#!/bin/sh
resume=
[ ! -e run/checkpoints/latest ] || resume=--resume
exec {train} --launcher {launcher} --run-dir run --policy "policy(requeue=True)" $resume
"""


@pytest.fixture(autouse=True)
def nothing_is_left_on_a_node(cluster: SlurmCluster, eventually: Eventually) -> Iterator[None]:
    """No process of a job stays on any node, whatever has happened to it."""
    yield
    cluster.ask("scancel", "--user=root")
    eventually(lambda: cluster.left() == [], within=20, what=f"nothing is left on the nodes, not {cluster.left()}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the home as well."""
    (tmp_path / "mine.py").write_text(MINE)
    secret = tmp_path / "apportion-secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of this test's own")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("APPORTION_SECRET_FILE", str(secret))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def started(cluster: SlurmCluster, project: Path) -> Iterator[Started]:
    """``started(*words)`` types a command on node1; none goes on after its test."""
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            secret = str(project / "apportion-secret")
            process = cluster.start(words, project, APPORTION_SECRET_FILE=secret)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def driver(cluster: SlurmCluster) -> int:
    found = {pid: words for pid, words in cluster.processes(0).items() if "-m apportion train" in words}
    (pid,) = (pid for pid, words in found.items() if "salloc" not in words)
    return pid


def saved(project: Path) -> int:
    return int(os.readlink(project / "run/checkpoints/latest").partition("-")[2])


def test_sigusr1_to_the_driver_is_the_notice(
    cluster: SlurmCluster, project: Path, started: Started, eventually: Eventually
) -> None:
    process = started(*TWO_NODES, *TRAIN, "--launcher", "slurm()", "--run-dir", "run")
    await_steps(project / "run", process, eventually)
    began = time.monotonic()
    os.kill(driver(cluster), signal.SIGUSR1)
    _, err = process.communicate(timeout=SECONDS)
    print(f"{time.monotonic() - began:.2f} s from SIGUSR1 to the end")
    assert process.returncode == 128 + signal.SIGUSR1, err
    assert f"told to end by SIGUSR1; step {saved(project)} is saved" in err


@pytest.mark.parametrize("what", ["SIGUSR1 to all steps", "scancel"])
def test_what_slurm_sends_to_every_process_of_the_steps_is_the_notice_of_the_agents(
    what: str, cluster: SlurmCluster, project: Path, started: Started, eventually: Eventually
) -> None:
    process = started(*TWO_NODES, *TRAIN, "--launcher", "slurm()", "--run-dir", "run")
    await_steps(project / "run", process, eventually)
    job = cluster.ask("squeue", "--noheader", "--format=%i")
    began = time.monotonic()
    cluster.ask("scancel", *(["--signal=USR1"] if what != "scancel" else []), job)
    _, err = process.communicate(timeout=SECONDS)
    print(f"{time.monotonic() - began:.2f} s from {what} to the end")
    name = "SIGTERM" if what == "scancel" else "SIGUSR1"
    assert re.search(rf"host node\d was told to end by {name}; step {saved(project)} is saved", err), err
    assert process.returncode == 128 + getattr(signal, name), err


@pytest.mark.parametrize("number", ["TERM", "USR1"])
def test_ranks_of_srun_stop_at_one_step_and_the_same_command_goes_on(
    number: str, cluster: SlurmCluster, project: Path, started: Started, eventually: Eventually
) -> None:
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", *TRAIN, "--launcher", "env", "--run-dir", "run")
    process = started(*command)
    await_steps(project / "run", process, eventually)
    (step,) = re.findall(r"^(\d+\.\d+) ", cluster.ask("squeue", "--steps", "--noheader", "--format=%i %N"), re.M)
    began = time.monotonic()
    cluster.ask("scancel", f"--signal={number}", step)
    _, err = process.communicate(timeout=SECONDS)
    print(f"{time.monotonic() - began:.2f} s from SIG{number} to the end")
    assert process.returncode != 0, err
    assert err.count(f"told to end by SIG{number}; step {saved(project)} is saved") == 1, err
    last = saved(project) + 3
    process = started(*command, "--resume", "--steps", str(last))
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert saved(project) == last


@pytest.mark.parametrize("launcher", ["slurm", "'local(workers=2,threads=1)'"], ids=["slurm", "local"])
def test_a_job_that_is_told_to_end_requeues_itself_and_goes_on(
    launcher: str, cluster: SlurmCluster, project: Path, started: Started, eventually: Eventually
) -> None:
    (project / "job").write_text(BATCH.format(train=" ".join(TRAIN), launcher=launcher))
    options = ("--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--requeue", "--output=said")
    out, _ = started("sbatch", *options, "job").communicate(timeout=SECONDS)
    job = out.strip()
    said = project / "said"
    events = project / "run/events.jsonl"
    makes = '"kind":"step"'
    eventually(lambda: events.exists() and makes in events.read_text(), within=SECONDS, what="it trains")
    cluster.ask("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@60 does
    eventually(lambda: cluster.ask("squeue", "--noheader", "--format=%T") == "PENDING", within=30, what="it waits")
    assert f"told to end by SIGUSR1; step {saved(project)} is saved" in said.read_text()
    assert f"job {job} is requeued" in said.read_text()
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")  # it would for two minutes
    eventually(lambda: "resumed at step" in said.read_text(), within=SECONDS, what="it goes on")
    cluster.ask("scancel", "--signal=KILL", "--full", job)
    cluster.ask("scancel", job)
