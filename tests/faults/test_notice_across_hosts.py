"""SIGTERM to the driver of several hosts, or to the agent of one, is the notice to end.

All ranks stop at one step, which is saved, and ``resume`` goes on to the bits of the undisturbed run. Real sshds in
network namespaces, real signals.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from driven_hosts import DrivenRun, differences, driven, weights
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left_on_a_host"),
]
HOSTS = 2
TWO = "a:1", "b:1"
STEPS = 60
SECONDS = 5.0


@pytest.fixture(scope="module")
def calm(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run with nothing happening to it."""
    project = tmp_path_factory.mktemp("calm")
    with driven(hosts, project, *TWO, steps=STEPS) as run:
        assert run.end()["step"] == STEPS
    return project


def agent(hosts: SshHosts, host: str) -> int:
    """The process of a host's agent."""
    found = {pid: words for pid, words in hosts.processes(host).items() if "-m apportion.runtime.hosts.agent" in words}
    (pid,) = (pid for pid, words in found.items() if " -c " not in words)
    return pid


def told_to_end(run: DrivenRun, hosts: SshHosts, pid: int) -> float:
    """Sends SIGTERM, and returns the seconds until everything has ended on every host."""
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    run.process.wait(60)
    while hosts.left():
        assert time.monotonic() - began < 30, hosts.left()
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("who", ["the driver", "the agent on a", "the agent on b"])
def test_sigterm_saves_and_the_same_run_goes_on_to_the_same_bits(
    who: str, hosts: SshHosts, tmp_path: Path, calm: Path
) -> None:
    with driven(hosts, tmp_path, *TWO, steps=STEPS, pause=0.05) as run:
        run.until_step(5)
        pid = run.process.pid if who == "the driver" else agent(hosts, who[-1])
        took = told_to_end(run, hosts, pid)
        print(f"{took:.2f} s from SIGTERM to {who} to the end of everything")
        run.until(lambda: run.told[-1][1]["kind"] == "end" and any("go on with" in line for line in run.said), 10)
        last = run.told[-1][1]
        assert run.process.returncode == 128 + signal.SIGTERM, run.text()
        assert took < SECONDS
    assert (last["data"]["reason"], last["data"]["why"]) == ("interrupted", None), run.text()
    assert 5 <= last["step"] < STEPS
    whose = "" if who == "the driver" else f"host {who[-1]} was "
    at = run.said.index(f"{whose}told to end by SIGTERM; step {last['step']} is saved")
    assert run.said[at + 1] == "go on with: resume=True, run_dir='run'"
    assert run.said[at + 2] == f"it is on host a, in {tmp_path}/run"
    assert not any("Traceback" in line for line in run.said), run.text()
    assert os.readlink(tmp_path / "run" / "checkpoints" / "latest") == f"step-{last['step']:08d}"
    with driven(hosts, tmp_path, *TWO, steps=STEPS, resume=True) as run:
        assert run.end()["step"] == STEPS
    assert differences(weights(tmp_path), weights(calm)) == {}


def test_an_agent_whose_driver_is_stopped_ends_by_itself(hosts: SshHosts, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO, steps=10_000) as run:
        run.until_step(5)
        process = agent(hosts, "b")
        os.kill(run.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        os.kill(process, signal.SIGTERM)
        while process in hosts.processes("b"):
            assert time.monotonic() - began < 20
            time.sleep(0.01)
        print(f"{time.monotonic() - began:.2f} s from SIGTERM to the end of the agent")
        os.kill(run.process.pid, signal.SIGCONT)


def test_a_second_sigterm_ends_an_agent_at_once(hosts: SshHosts, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO, steps=10_000) as run:
        run.until_step(5)
        process = agent(hosts, "b")
        os.kill(run.process.pid, signal.SIGSTOP)
        os.kill(process, signal.SIGTERM)
        time.sleep(1.0)  # two within half a second are one
        assert process in hosts.processes("b")
        began = time.monotonic()
        os.kill(process, signal.SIGTERM)
        while process in hosts.processes("b"):
            assert time.monotonic() - began < SECONDS
            time.sleep(0.01)
        os.kill(run.process.pid, signal.SIGCONT)
