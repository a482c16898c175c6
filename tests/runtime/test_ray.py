"""One command trains on the nodes of a Ray cluster: two real raylets, real failures, real kills.

Ray's own processes have neither torch nor apportion; the ranks have another interpreter, which ``python=`` names.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray_cluster
from commands import SECONDS
from conftest import Eventually, Within
from launched_drivers import await_steps, ended, forked_ranks, own_lines
from launched_runs import assert_losses_of_one_device
from proc_files import told_of
from ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.serial, pytest.mark.timeout(400)]

TRAIN = (sys.executable, "-m", "apportion", "train")
OWN = """
import json, sys
import apportion, ray

ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
free = ray.available_resources()
if __name__ == "__main__":
    for event in apportion.run(
        "mine.py:workload", "data_parallel", launcher=apportion.ray(workers=1, python=sys.argv[1]), run_dir="run",
        check=False,
    ):
        if event.kind == "step" and event.step > 10:
            during = ray.available_resources()
    told = {name: [having.get(name, 0) for having in (free, during)] for name in ("CPU", "object_store_memory")}
    print(json.dumps({**told, "joined": ray.is_initialized(), "environment": ray.get_runtime_context().runtime_env}))
"""
"""A program that is a driver of Ray's itself, and says what was taken of the cluster while it trained."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    why = ray_cluster.cannot()
    if why is not None:
        pytest.skip(why)
    with ray_cluster.ray_cluster(tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    ray_cluster.write_project(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Train = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(cluster: RayCluster, project: Path) -> Iterator[Train]:
    """``train("mine.py:endless", "workers=1", "--steps", "9")`` starts a training; none goes on after its test."""
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            process = stack.enter_context(cluster.train(project, *words))
            stack.callback(process.kill)
            return process

        yield start


def assert_nothing_is_left(cluster: RayCluster, eventually: Eventually) -> None:
    """No process of a run stays on any node, and no file of its."""
    eventually(lambda: cluster.left() == [], within=10, what=f"nothing is left on the nodes, not {cluster.left()}")
    eventually(lambda: not list(cluster.folders.glob("apportion-hosts-*")), within=5, what="no folder of a run is left")


def found(cluster: RayCluster, node: int, words: str) -> list[int]:
    return [pid for pid, told in cluster.processes(node).items() if words in told]


def test_a_program_of_rays_own_trains_on_the_nodes_and_nothing_comes_into_the_object_store(
    cluster: RayCluster, project: Path, eventually: Eventually
) -> None:
    (project / "own.py").write_text(OWN)
    out, err = ended(cluster.start([sys.executable, "own.py", f"{project}/python"], project))
    assert_losses_of_one_device(project / "run", project / "mine.py")
    assert {"node1, rank 0: made", "node2, rank 1: made"} <= set(err.splitlines())
    told = json.loads(out.splitlines()[-1])
    assert told["CPU"] == [4, 2]
    assert told["object_store_memory"][0] == told["object_store_memory"][1]
    assert told["joined"], "what the program has joined, it is still in"
    assert not told["environment"]
    assert_nothing_is_left(cluster, eventually)


def told(process: subprocess.Popen[str], words: str) -> str:
    """Waits for a line on the output of a command that begins with these words, and returns it."""
    assert process.stdout is not None
    late = threading.Timer(SECONDS, process.kill)
    late.start()
    try:
        for line in process.stdout:
            if line.startswith(words):
                return line
    finally:
        late.cancel()
        late.join()
    raise AssertionError(f"{words!r} was not said: {process.communicate(timeout=SECONDS)}")


def kill_on_node2(cluster: RayCluster, victim: str) -> None:
    """Kills the rank, the agent or the actor on the second node."""
    pids = {
        "rank": lambda: sorted(forked_ranks(list(cluster.processes(1))))[:1],  # the spare is forked after it
        "agent": lambda: [
            pid for pid in found(cluster, 1, "-m apportion.runtime.hosts.agent") if pid not in found(cluster, 1, " -c ")
        ],
        "actor": lambda: found(cluster, 1, "ray::_Carrier"),
    }[victim]()
    (pid,) = pids
    os.kill(pid, signal.SIGKILL)


CAUSES = {
    "rank": "rank 1 on host node2 was killed by SIGKILL",
    "agent": "host node2 is lost with rank 1: its agent was ended by SIGKILL, by hand or by the system, and its ranks",
    "actor": "host node2 is lost with rank 1: Ray has lost the actor that held its agent (",
}
"""What is said of each of these that is killed."""


def test_a_rank_that_is_killed_is_replaced_and_the_losses_are_those_of_one_device(
    cluster: RayCluster, project: Path, train: Train, eventually: Eventually
) -> None:
    process = train("mine.py:endless", "workers=1", "--steps", "100")
    await_steps(project / "run", process, eventually)
    kill_on_node2(cluster, "rank")
    out, err = ended(process)
    assert own_lines(err) == []
    (fault,) = (line for line in out.splitlines() if line.startswith("fault: "))
    assert fault.startswith(f"fault: {CAUSES['rank']}"), fault
    assert re.search(r" \(replaced in [\d.]+ s\)$", fault), fault
    assert_losses_of_one_device(project / "run", project / "mine.py", 100)
    assert_nothing_is_left(cluster, eventually)


@pytest.mark.parametrize("victim", ["agent", "actor"])
def test_the_others_go_on_without_a_node_that_is_lost_and_then_with_another_actor_on_it(
    cluster: RayCluster, project: Path, train: Train, within: Within, eventually: Eventually, victim: str
) -> None:
    process = train("mine.py:endless")
    await_steps(project / "run", process, eventually)
    with within(15, "the others go on"):
        kill_on_node2(cluster, victim)
        fault = told(process, "fault: ")
    assert fault.startswith(f"fault: {CAUSES[victim]}"), fault
    assert fault.endswith("(goes on with 1 worker)\n"), fault
    assert told(process, "fault: ") == "fault: host node2 takes part again, with rank 1 (goes on with 2 workers)\n"
    told(process, "epoch ")
    told(process, "epoch ")
    (driver,) = found(cluster, 0, "-m apportion train")
    os.kill(driver, signal.SIGINT)
    _, err = ended(process, 130)
    assert "is saved" in err
    assert_nothing_is_left(cluster, eventually)


@pytest.mark.parametrize("victim", CAUSES)
def test_what_is_killed_on_a_node_of_a_run_that_may_lose_nothing_is_one_clear_message(
    cluster: RayCluster, project: Path, train: Train, within: Within, eventually: Eventually, victim: str
) -> None:
    process = train("mine.py:endless", "workers=1", "--policy", "policy(max_restarts=0)")
    await_steps(project / "run", process, eventually)
    with within(15, "the end"):
        kill_on_node2(cluster, victim)
        _, err = ended(process, 3)
    (error,) = own_lines(err)
    assert error.startswith(f"error: {CAUSES[victim]}"), err
    assert error.endswith("the run may lose no more workers (max_restarts=0); --resume goes on"), err
    assert_nothing_is_left(cluster, eventually)


def assert_the_secret_is_nowhere_else(cluster: RayCluster) -> None:
    """The secret of a run lies in a file of its owner's, and in no argument, no variable and no file of Ray's."""
    files = list(cluster.folders.glob("apportion-hosts-*/secret"))
    assert len(files) == 2
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        secret = file.read_bytes()
        for node in (0, 1):
            for pid in cluster.all_processes(node):
                told = [told_of(pid, what) for what in ("cmdline", "environ")]
                assert all(secret not in text for text in told)
        for log in (path for node in (1, 2) for path in (cluster.folder / f"node{node}").rglob("*")):
            assert not log.is_file() or secret not in log.read_bytes(), log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_saves_and_a_driver_that_is_ended_leaves_nothing(
    cluster: RayCluster, project: Path, eventually: Eventually, number: signal.Signals
) -> None:
    process = cluster.train(project, "mine.py:endless")
    await_steps(project / "run", process, eventually)
    assert_the_secret_is_nowhere_else(cluster)
    (driver,) = found(cluster, 0, "-m apportion train")
    os.kill(driver, number)
    _, err = process.communicate(timeout=SECONDS)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "is saved" in err
        assert err.endswith(f"it is on host node1, in {project}/run\n")
    assert_nothing_is_left(cluster, eventually)


@pytest.mark.parametrize("whose", ["driver", "agent"])
def test_the_notice_to_end_saves_and_the_same_command_goes_on(
    cluster: RayCluster, project: Path, eventually: Eventually, within: Within, whose: str
) -> None:
    """SIGTERM, of the driver or of a node's agent."""
    process = cluster.train(project, "mine.py:endless")
    await_steps(project / "run", process, eventually)
    if whose == "driver":
        (pid,) = found(cluster, 0, "-m apportion train")
    else:
        agents = found(cluster, 1, "-m apportion.runtime.hosts.agent")
        (pid,) = (pid for pid in agents if pid not in found(cluster, 1, " -c "))
    with within(5, "saving and ending"):
        os.kill(pid, signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "told to end" in err, err
    (step,) = re.findall(r"told to end by SIGTERM; step (\d+) is saved", err)
    assert_nothing_is_left(cluster, eventually)
    before = (project / "run" / "events.jsonl").read_text().count('"checkpoint"')
    process = cluster.train(project, "mine.py:endless", "workers=1", "--resume")
    eventually(
        lambda: (project / "run" / "events.jsonl").read_text().count('"checkpoint"') > before,
        within=SECONDS,
        what="it goes on",
    )
    os.kill(found(cluster, 0, "-m apportion train")[0], signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    (last,) = re.findall(r"step (\d+) is saved", err)
    assert int(last) > int(step)
    assert_nothing_is_left(cluster, eventually)


def test_cores_that_are_not_free_are_named_and_given_back(
    cluster: RayCluster, project: Path, eventually: Eventually
) -> None:
    _, err = ended(cluster.train(project, "mine.py:workload", "workers=3"), 3)
    assert re.search(r"^error: Ray has not found 3 CPU on 2 nodes for 20 s: free are 4 CPU on all nodes together", err)
    _, err = ended(cluster.train(project, "mine.py:workload", "nodes=3"), 3)
    assert err.startswith("error: the Ray cluster has 2 nodes with cores, and nodes=3 are wanted")
    assert not (project / "run").exists()
    ended(cluster.train(project, "mine.py:workload", "nodes=1"))
    assert_losses_of_one_device(project / "run", project / "mine.py")
    assert_nothing_is_left(cluster, eventually)
