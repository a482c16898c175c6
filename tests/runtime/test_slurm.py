"""Ranks that srun has started, on a real Slurm cluster of two nodes: what a user types, and what goes wrong."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SECONDS
from conftest import Eventually, Within
from launched_runs import MINE, STEPS, assert_losses_of_one_device, losses
from proc_files import told_of
from slurm_cluster import SlurmCluster

from apportion.comm.network.slurm import first_port

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.serial]

SBATCH = Path(__file__).parents[2] / "docs" / "slurm" / "train.sbatch"
TAKE = """
import socket, sys
taken = socket.create_server(("10.123.46.1", int(sys.argv[1])))
print("taken", flush=True)
while True:
    taken.accept()[0].close()
"""
"""Another program at a port of node1's."""
ON_TWO_NODES = ("srun", "--nodes=2", "--ntasks-per-node=2")
TRAIN = (sys.executable, "-m", "apportion", "train")
DATA_PARALLEL = ("--strategy", "data_parallel", "--launcher", "env", "--run-dir", "run")


@pytest.fixture(autouse=True)
def nothing_is_left_on_a_node(cluster: SlurmCluster, eventually: Eventually) -> Iterator[None]:
    """No process of a job stays on any node, whatever has happened to it."""
    yield
    eventually(lambda: cluster.left() == [], within=10, what=f"nothing is left on the nodes, not {cluster.left()}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the home as well."""
    (tmp_path / "mine.py").write_text(MINE)
    secret = tmp_path / "apportion-secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of this test's own")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def secret_of(project: Path) -> dict[str, str]:
    return {"APPORTION_SECRET_FILE": str(project / "apportion-secret")}


def ended(process: subprocess.Popen[str], seconds: float = SECONDS) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, out, err


def ranks(cluster: SlurmCluster) -> dict[int, int]:
    """The process of every rank that is running."""
    found = {}
    for node in (0, 1):
        for pid, words in cluster.processes(node).items():
            if "apportion train" in words and "srun" not in words:
                environment = told_of(pid, "environ").decode().split("\0")
                given = dict(text.split("=", 1) for text in environment if "=" in text)
                if "RANK" not in given and "SLURM_PROCID" in given:
                    found[int(given["SLURM_PROCID"])] = pid
    return found


def next_job(cluster: SlurmCluster) -> int:
    """The number of the next job."""
    return int(re.findall(r"NEXT_JOB_ID\s*=\s*(\d+)", cluster.ask("scontrol", "show", "config"))[0])


def test_srun_gives_the_losses_of_one_device_without_an_address_or_a_port(cluster: SlurmCluster, project: Path) -> None:
    """What would be the port of the run is another program's."""
    port = first_port({"SLURM_JOB_ID": str(next_job(cluster))})
    other = cluster.start([sys.executable, "-c", TAKE, str(port)], project)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        command = [*ON_TWO_NODES, *TRAIN, "mine.py:workload", *DATA_PARALLEL]
        status, out, err = ended(cluster.start(command, project, **secret_of(project)))
    finally:
        other.kill()
        other.communicate()
    assert status == 0, out + err
    assert out.count("final loss") == 1, "rank 0 tells it"
    assert_losses_of_one_device(project / "run", project / "mine.py")


@pytest.mark.parametrize(
    ("where", "secret"), [(("--nodes=2", "--ntasks=3"), True), (("--nodes=1", "--ntasks=2"), False)]
)
def test_nodes_may_have_different_numbers_of_ranks_and_one_node_needs_no_secret(
    cluster: SlurmCluster, project: Path, where: tuple[str, ...], secret: bool
) -> None:
    command = ["srun", *where, *TRAIN, "mine.py:workload", *DATA_PARALLEL, "--no-check"]
    status, out, err = ended(cluster.start(command, project, **(secret_of(project) if secret else {})))
    assert status == 0, out + err
    assert_losses_of_one_device(project / "run", project / "mine.py")


def test_without_a_secret_it_is_refused_with_the_command_that_makes_one(cluster: SlurmCluster, project: Path) -> None:
    status, out, err = ended(cluster.start([*ON_TWO_NODES, *TRAIN, "mine.py:workload", *DATA_PARALLEL], project))
    assert status == 2, out + err
    assert "APPORTION_SECRET_FILE is not set" in err
    assert "(umask 077; python3 -c" in err
    assert not (project / "run").exists()


@pytest.mark.parametrize("killed", [3, 0])
def test_a_rank_that_is_killed_ends_the_run_on_both_nodes_and_is_named(
    cluster: SlurmCluster, project: Path, within: Within, eventually: Eventually, killed: int
) -> None:
    command = [*ON_TWO_NODES, *TRAIN, "mine.py:endless", *DATA_PARALLEL, "--no-check"]
    srun = cluster.start(command, project, **secret_of(project))
    try:
        eventually(lambda: (project / "run" / "events.jsonl").exists(), within=SECONDS, what="it trains")
        os.kill(ranks(cluster)[killed], signal.SIGKILL)
        with within(10, "the end of the run"):
            status, _, err = ended(srun, 20)
    finally:
        srun.kill()
        srun.wait()
    assert status != 0
    assert re.search(rf"error: the connection to rank {killed} on node{killed // 2 + 1} at .* was lost", err), err


def submitted(cluster: SlurmCluster, project: Path) -> str:
    """The number of a job that runs the batch file of the documentation as it is."""
    shutil.copy(SBATCH, project)
    status, out, err = ended(cluster.start(["sbatch", "--parsable", "train.sbatch"], project))
    assert status == 0, err
    return out.strip()


def test_the_batch_file_of_the_documentation_trains(
    cluster: SlurmCluster, project: Path, eventually: Eventually
) -> None:
    job = submitted(cluster, project)
    eventually(lambda: cluster.ask("squeue", "--noheader") == "", within=SECONDS, what="the job has ended")
    said = (project / f"slurm-{job}.out").read_text()
    assert "final loss" in said, said
    assert len(losses(project / "runs" / job)) == STEPS


@pytest.mark.timeout(300)
def test_a_job_that_is_requeued_goes_on_and_scancel_leaves_nothing_of_it(
    cluster: SlurmCluster, project: Path, eventually: Eventually
) -> None:
    (project / "mine.py").write_text(MINE.replace("workload = made()", "workload = made(loss=slow, steps=100_000)"))
    job = submitted(cluster, project)
    run, said = project / "runs" / job, project / f"slurm-{job}.out"
    eventually((run / "checkpoints" / "latest").exists, within=SECONDS, what="it has saved a checkpoint")
    cluster.ask("scontrol", "requeue", job)
    eventually(lambda: cluster.ask("squeue", "--noheader", "--format=%T") == "PENDING", within=20, what="it waits")
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # it would for two minutes
    eventually(lambda: "resumed at step" in said.read_text(), within=SECONDS, what="it goes on")
    cluster.ask("scancel", job)
    eventually(lambda: cluster.ask("squeue", "--noheader") == "", within=10, what="the job has ended")
    eventually(lambda: cluster.left() == [], within=5, what="its processes have ended")


def test_a_command_without_srun_in_a_batch_script_is_refused(cluster: SlurmCluster, project: Path) -> None:
    wrapped = " ".join([*TRAIN, "mine.py:workload", *DATA_PARALLEL])
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--output=said", f"--wrap={wrapped}"]
    status, _, _ = ended(cluster.start(command, project, **secret_of(project)))
    assert status == 2
    assert "SLURM_NTASKS=4, but this process runs in the job's batch script" in (project / "said").read_text()
