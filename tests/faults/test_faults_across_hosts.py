"""What happens to a run on several hosts when something happens to its workers, its hosts and its cables: real sshds in
network namespaces, real kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_hosts
from conftest import Eventually
from driven_hosts import DrivenRun, differences, driven, weights
from ssh_hosts import SshHosts

pytestmark = [pytest.mark.processes, pytest.mark.serial]
TWO = "a:2", "b:2"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    why = ssh_hosts.cannot()
    if why is not None:
        pytest.skip(why)
    with ssh_hosts.ssh_hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_on_a_host(hosts: SshHosts, eventually: Eventually) -> Iterator[None]:
    """No process and no file of a run stays on any host, whatever has happened to it."""
    yield
    eventually(lambda: hosts.left() == [], within=15, what=f"nothing is left on the hosts, not {hosts.left()}")


@pytest.fixture(scope="module")
def calm(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run with nothing happening to it."""
    project = tmp_path_factory.mktemp("calm")
    with driven(hosts, project, *TWO) as run:
        assert run.end()["step"] == 120
        assert run.faults() == []
    return project


def begun(run: DrivenRun) -> None:
    """Waits until a run makes steps, and every rank has said its process."""
    run.until_step(5)
    run.until(lambda: sum(map(len, run.pids.values())) == 4)


@pytest.mark.parametrize(("host", "rank"), [("b", 3), ("b", 2), ("a", 1), ("a", 0)])
def test_a_worker_that_is_killed_is_replaced_and_the_bits_are_those_of_the_run_that_nothing_happened_to(
    hosts: SshHosts, calm: Path, tmp_path: Path, host: str, rank: int
) -> None:
    with driven(hosts, tmp_path, *TWO) as run:
        begun(run)
        run.kill(host, rank)
        run.kill(host, rank)
        assert run.end()["step"] == 120
        assert len(run.faults()) == 2
        for fault in run.faults():
            assert fault["cause"].startswith(f"rank {rank} on host {host} was killed by SIGKILL")
            assert fault["action"].startswith("replaced in ")
    assert differences(weights(calm), weights(tmp_path)) == {}


def test_a_worker_that_is_stopped_is_replaced(hosts: SshHosts, calm: Path, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO) as run:
        begun(run)
        run.kill("b", 2, signal.SIGSTOP)
        assert run.end()["step"] == 120
        (fault,) = run.faults()
        assert "rank 2" in fault["cause"]
        assert "SIGSTOP" in fault["cause"]
    assert differences(weights(calm), weights(tmp_path)) == {}


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_others_go_on_when_all_processes_of_a_host_are_killed(hosts: SshHosts, tmp_path: Path, lost: str) -> None:
    with driven(hosts, tmp_path, "b:2", "c:2") as run:
        begun(run)
        gone = {"a": "b", "b": "c"}[lost]  # the first, and the second
        for pid in hosts.processes(gone):
            os.kill(pid, signal.SIGKILL)
        assert run.end()["step"] == 120
        (fault,) = run.faults()
        assert f"host {gone} is lost with ranks" in fault["cause"]
        assert fault["action"] == "goes on with 2 workers"
