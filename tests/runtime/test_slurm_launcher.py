"""One command inside an allocation trains on its nodes: a real Slurm cluster of two, real failures, real kills."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import SECONDS
from conftest import Eventually, Within
from launched_drivers import TALKING, await_steps, ended, forked_ranks, own_lines
from launched_runs import assert_losses_of_one_device, losses
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.serial, pytest.mark.timeout(300)]

TWO_NODES = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
TRAIN = (sys.executable, "-m", "apportion", "train")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Where both nodes keep the folders of runs."""
    found = tmp_path / "folders"
    found.mkdir()
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_on_a_node(cluster: SlurmCluster, folders: Path, eventually: Eventually) -> Iterator[None]:
    """No process of a job stays on any node, and no file of a run, whatever has happened to it."""
    yield
    eventually(lambda: cluster.left() == [], within=10, what=f"nothing is left on the nodes, not {cluster.left()}")
    eventually(lambda: not list(folders.glob("apportion-hosts-*")), within=5, what="no folder of a run is left")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the home as well."""
    (tmp_path / "mine.py").write_text(TALKING)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.8 22")  # a job keeps what sshd has said at a login
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def started(cluster: SlurmCluster, project: Path, folders: Path) -> Iterator[Started]:
    """``started("mine.py:workload", "--workers", "1")`` trains in an allocation; none goes on after its test."""
    with ExitStack() as stack:

        def start(*words: str, where: tuple[str, ...] = TWO_NODES, run: str = "run") -> subprocess.Popen[str]:
            launcher = () if "--launcher" in words else ("--launcher", "slurm()")
            command = [*where, *TRAIN, *words, *launcher, "--strategy", "data_parallel", "--run-dir", run, "--no-check"]
            process = cluster.start(command, project, TMPDIR=str(folders))
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def found(cluster: SlurmCluster, node: int, words: str) -> list[int]:
    return [pid for pid, told in cluster.processes(node).items() if words in told]


def driver(cluster: SlurmCluster) -> int:
    (pid,) = (pid for pid in found(cluster, 0, "-m apportion train") if pid not in found(cluster, 0, "salloc"))
    return pid


def test_a_run_has_the_bits_of_the_ranks_that_srun_starts(
    cluster: SlurmCluster, project: Path, started: Started
) -> None:
    two_of_two = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2")
    _, err = ended(started("mine.py:workload", where=two_of_two))
    assert_losses_of_one_device(project / "run", project / "mine.py")
    assert {f"node{1 + rank // 2}, rank {rank}: made" for rank in range(4)} <= set(err.splitlines())
    secret = project / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of this test's own")
    by_hand = [*TRAIN, "mine.py:workload", "data_parallel", "--launcher", "env", "--run-dir", "env", "--no-check"]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=2", *by_hand]
    ended(cluster.start(srun, project, APPORTION_SECRET_FILE=str(secret)))
    assert losses(project / "run") == losses(project / "env")


def test_nodes_have_as_many_workers_as_they_have_cores_of_the_job_or_as_is_said(
    project: Path, started: Started
) -> None:
    """Of the two cores of the second node the job has one: it asks for three."""
    _, err = ended(started("mine.py:workload", where=("salloc", "--quiet", "--nodes=2", "--ntasks=3")))
    assert {"node1, rank 1: made", "node2, rank 2: made"} <= set(err.splitlines())
    assert "node2, rank 3" not in err
    whole = ("salloc", "--quiet", "--nodes=2", "--exclusive")
    _, err = ended(started("mine.py:workload", where=whole, run="whole"))
    assert {"node1, rank 1: made", "node2, rank 3: made"} <= set(err.splitlines())
    _, err = ended(started("mine.py:workload", "--workers", "1", where=whole, run="one"))
    assert "node2, rank 1: made" in err
    assert losses(project / "run") != losses(project / "one")


def test_a_shell_that_is_a_step_itself_and_the_batch_script_start_runs_too(
    cluster: SlurmCluster, project: Path, started: Started
) -> None:
    shell = ("salloc", "--quiet", "--nodes=2", "--exclusive", "srun", "--nodes=1", "--ntasks=1", "--interactive")
    ended(started("mine.py:workload", "--launcher", "slurm(workers=1)", where=shell))
    assert_losses_of_one_device(project / "run", project / "mine.py")
    wrapped = " ".join([*TRAIN, "mine.py:workload", "data_parallel", "--launcher", "'slurm(workers=1)'", "--no-check"])
    batch = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--output=said", "--export=NONE"]
    ended(cluster.start([*batch, f"--wrap=export PYTHONPATH={cluster.environment['PYTHONPATH']}; {wrapped}"], project))
    assert "final loss" in (project / "said").read_text()


def test_outside_an_allocation_and_in_each_of_several_tasks_it_is_refused(
    cluster: SlurmCluster, project: Path, started: Started
) -> None:
    _, err = ended(started("mine.py:workload", where=()), 2)
    assert err.startswith("error: slurm() starts ranks on the nodes of an allocation, and SLURM_JOB_ID is not set here")
    assert "salloc --nodes=2" in err
    _, err = ended(started("mine.py:workload", where=("srun", "--nodes=2", "--ntasks=2", "--quiet")), 2)
    assert "this is one of 2 tasks that srun has started: leave srun out, or say --launcher env" in err
    assert not (project / "run").exists()


def test_ctrl_c_saves_and_the_run_goes_on(
    cluster: SlurmCluster, project: Path, started: Started, within: Within, eventually: Eventually
) -> None:
    process = started("mine.py:endless")
    await_steps(project / "run", process, eventually)
    os.kill(driver(cluster), signal.SIGINT)
    with within(15, "the end"):
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert "is saved" in err
    assert err.endswith(f"it is on host node1, in {project}/run\n")
    saved = max(int(path.name.partition("-")[2]) for path in (project / "run/checkpoints").glob("step-*"))
    ended(started("mine.py:endless", "--resume", "--steps", str(saved + 3)))
    assert os.readlink(project / "run/checkpoints/latest") == f"step-{saved + 3:08d}"


LONG = {"slurmstepd": 30, "shell": 90}
"""The seconds until the end where they are more than 15: srun waits for a minute for the output of a task whose shell
is gone, in which the agent, and the run, go on."""
VICTIMS = {
    "rank": "rank 1 on host node2 was killed by SIGKILL",
    "agent": "host node2 is lost with rank 1: its agent was ended by SIGKILL, by hand or by the system",
    "shell": "host node2 is lost with rank 1: its agent was ended by SIGKILL, by hand or by the system",
    "slurmstepd": "rank 1 on host node2 has not answered for ",
    "srun": "host node2 is lost with rank 1: its srun was ended by SIGKILL",
    "step": "host node2 is lost with rank 1: Slurm has cancelled the step that held its agent",
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_what_is_killed_on_a_node_is_one_clear_message(  # noqa: PLR0913 (the fixtures)
    cluster: SlurmCluster,
    project: Path,
    folders: Path,
    started: Started,
    within: Within,
    eventually: Eventually,
    victim: str,
) -> None:
    """Of a run that may lose nothing: others go on."""
    process = started("mine.py:endless", "--policy", "policy(max_restarts=0)")
    await_steps(project / "run", process, eventually)
    if victim == "step":
        (step,) = re.findall(
            r"^(\d+\.\d+) node2$", cluster.ask("squeue", "--steps", "--noheader", "--format=%i %N"), re.M
        )
        cluster.ask("scancel", step)
    else:
        pids = {
            "rank": lambda: forked_ranks(list(cluster.processes(1))),
            "agent": lambda: [
                pid
                for pid in found(cluster, 1, "-m apportion.runtime.hosts.agent")
                if pid not in found(cluster, 1, " -c ")
            ],
            "shell": lambda: found(cluster, 1, "sh -c "),
            "slurmstepd": lambda: found(cluster, 1, "slurmstepd"),
            "srun": lambda: found(cluster, 0, "--nodelist=node2"),
        }[victim]()
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    with within(LONG.get(victim, 15), "the end"):
        _, err = ended(process, 3)
    errors = own_lines(err)
    assert len(errors) == 1, err
    assert errors[0].startswith(f"error: {VICTIMS[victim]}"), err
    assert errors[0].endswith("(max_restarts=0); --resume goes on"), err
    assert errors[0].count("--resume goes on") == 1, err
    if victim == "step":  # Slurm has killed the shell too that removes the folder: the next run's agent does
        for folder in folders.iterdir():
            shutil.rmtree(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_nothing(
    cluster: SlurmCluster, project: Path, started: Started, eventually: Eventually, number: signal.Signals
) -> None:
    process = started("mine.py:endless")
    await_steps(project / "run", process, eventually)
    os.kill(driver(cluster), number)
    process.communicate(timeout=SECONDS)
    eventually(lambda: cluster.left() == [], within=10, what="nothing is left on the nodes")


def test_a_job_that_is_cancelled_leaves_nothing(
    cluster: SlurmCluster, project: Path, started: Started, eventually: Eventually
) -> None:
    process = started("mine.py:endless")
    await_steps(project / "run", process, eventually)
    cluster.ask("scancel", "--full", cluster.ask("squeue", "--noheader", "--format=%i"))
    process.communicate(timeout=SECONDS)
    eventually(lambda: cluster.left() == [], within=15, what="nothing is left on the nodes")


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("slurm(python='/opt/python9')", r"host node\d has no Python /opt/python9: install it there"),
        ("slurm(options=('--no-such-option',))", r"host node\d: Slurm does not start its agent \(.*no-such-option"),
        ("slurm(options=('--cpus-per-task=99',))", r"host node\d: Slurm does not start its agent \(.*More processors"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_message(
    project: Path, started: Started, within: Within, launcher: str, told: str
) -> None:
    process = started("mine.py:workload", "--launcher", launcher)
    with within(30, "the message"):
        _, err = ended(process, 3)
    assert re.search(f"^error: {told}", err), err
    assert len(err.splitlines()) == 1, err
    assert not (project / "run").exists()
