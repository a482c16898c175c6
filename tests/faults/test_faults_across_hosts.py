"""What happens to a run on several hosts when something happens to its workers, its hosts and its cables: real sshds in
network namespaces, real kills."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import median

import pytest
from driven_hosts import DrivenRun, cut, differences, driven, from_one_device, weights
from ssh_hosts import SshHosts

pytestmark = [pytest.mark.processes, pytest.mark.serial, pytest.mark.usefixtures("nothing_is_left_on_a_host")]
HOSTS = 3
TWO = "a:2", "b:2"


@pytest.fixture(scope="module")
def calm(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run with nothing happening to it."""
    project = tmp_path_factory.mktemp("calm")
    with driven(hosts, project, *TWO) as run:
        assert run.end()["step"] == 120
        assert run.faults() == []
    return project


def lost(run: DrivenRun, name: str) -> dict[str, object]:
    """Waits until it is told that a host is lost, and returns what was told."""

    def told() -> list[dict[str, object]]:
        return [fault for fault in run.faults() if str(fault["cause"]).startswith(f"host {name} is lost")]

    run.until(lambda: bool(told()))
    return told()[0]


@pytest.mark.slow
def test_a_worker_on_another_host_that_is_killed_is_replaced_and_the_network_is_that_of_one_device(
    hosts: SshHosts, tmp_path: Path
) -> None:
    with driven(hosts, tmp_path, "a:1", "b:1", steps=20, dropout=0.0) as run:
        run.until_step(2)
        run.kill("b", 1)
        assert run.end()["step"] == 20
        (fault,) = run.faults()
        assert fault["cause"].startswith("rank 1 on host b was killed by SIGKILL")
        assert fault["action"].startswith("replaced in ")
    assert from_one_device(tmp_path, 20) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 0], ids=["on another host", "rank 0"])
def test_a_worker_that_is_killed_is_replaced_and_the_bits_are_those_of_the_run_that_nothing_happened_to(
    hosts: SshHosts, calm: Path, tmp_path: Path, rank: int
) -> None:
    with driven(hosts, tmp_path, *TWO) as run:
        run.until_begun(4)
        host = "a" if rank < 2 else "b"
        run.kill(host, rank)
        run.kill(host, rank)
        assert run.end()["step"] == 120
        assert len(run.faults()) == 2
        for fault in run.faults():
            assert fault["cause"].startswith(f"rank {rank} on host {host} was killed by SIGKILL")
            assert fault["action"].startswith("replaced in ")
    assert differences(weights(calm), weights(tmp_path)) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_workers_that_are_killed_leave_the_bits_of_the_run_that_nothing_happened_to(
    hosts: SshHosts, tmp_path: Path
) -> None:
    projects = tmp_path / "calm", tmp_path / "killed"
    for project in projects:
        project.mkdir()
    with driven(hosts, projects[0], *TWO, steps=2000, pause=0.0) as run:
        assert run.end()["step"] == 2000
    seconds = []
    with driven(hosts, projects[1], *TWO, steps=2000, pause=0.0, max_restarts=50) as run:
        run.until_begun(4)
        for number in range(50):
            seconds.append(run.kill("b", 2 + number % 2))
        assert run.end()["step"] == 2000
        assert len(run.faults()) == 50
    assert differences(weights(projects[0]), weights(projects[1])) == {}
    print(f"seconds until the next step: median {median(seconds):.2f}, worst {max(seconds):.2f}")


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_replaced(hosts: SshHosts, calm: Path, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO) as run:
        run.until_begun(4)
        run.kill("b", 2, signal.SIGSTOP)
        assert run.end()["step"] == 120
        (fault,) = run.faults()
        assert "rank 2" in fault["cause"]
        assert "SIGSTOP" in fault["cause"]
    assert differences(weights(calm), weights(tmp_path)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the first", "the second"])
def test_a_host_that_is_lost_and_comes_back_changes_nothing_of_the_network(
    hosts: SshHosts, tmp_path: Path, which: str
) -> None:
    """The others go on without it, and it takes part again, from the state that they have."""
    name = "b" if which == "the first" else "c"
    with driven(hosts, tmp_path, "b:2", "c:2", steps=500, pause=0.05, dropout=0.0) as run:
        run.until_begun(4)
        hosts.wipe(name)
        assert lost(run, name)["action"] == "goes on with 2 workers"
        run.until(lambda: any("takes part again" in fault["cause"] for fault in run.faults()))
        back = run.step
        run.until_step(back + 10)
        assert run.end()["step"] == 500
    assert from_one_device(tmp_path, 500) < 1e-10


@pytest.mark.slow
def test_a_host_whose_agent_is_stopped_is_suspected_and_then_given_up(hosts: SshHosts, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, "b:2", "c:2", steps=300, pause=0.05, dropout=0.0) as run:
        run.until_begun(4)
        (agent,) = [
            pid
            for pid, words in hosts.processes("c").items()
            if "-m apportion.runtime.hosts.agent" in words and " -c " not in words
        ]
        began = time.monotonic()
        os.kill(agent, signal.SIGSTOP)
        run.until(lambda: any("has said nothing" in fault["cause"] for fault in run.faults()))
        assert time.monotonic() - began < 4.0
        fault = lost(run, "c")
        assert time.monotonic() - began < 9.0
        assert "it has said nothing for" in str(fault["cause"])
        os.kill(agent, signal.SIGCONT)
        assert run.end()["step"] == 300


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, 3])
def test_a_cable_that_is_cut_for_a_moment_makes_the_run_pause(
    hosts: SshHosts, calm: Path, tmp_path: Path, seconds: int
) -> None:
    with driven(hosts, tmp_path, *TWO) as run:
        run.until_begun(4)
        with cut(hosts, "b"):
            time.sleep(0.5)  # what was told before arrives
            before = run.step
            time.sleep(seconds - 0.5)  # what is tested is that nothing happens meanwhile
            assert run.step == before, "nothing goes through the cable"
        assert run.end()["step"] == 120
        assert all("is lost" not in fault["cause"] for fault in run.faults()), run.faults()
    assert differences(weights(calm), weights(tmp_path)) == {}


@pytest.mark.slow
def test_the_others_go_on_when_a_cable_is_cut_for_longer(hosts: SshHosts, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO, steps=600, pause=0.05, dropout=0.0) as run:
        run.until_begun(4)
        began = time.monotonic()
        with cut(hosts, "b"):
            assert lost(run, "b")["action"] == "goes on with 2 workers"
            assert time.monotonic() - began < 9.0
            run.until_step(run.step + 20)
        run.until(lambda: any("takes part again" in fault["cause"] for fault in run.faults()))
        assert run.end()["step"] == 600
    assert from_one_device(tmp_path, 600) < 1e-10
