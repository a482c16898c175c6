"""One run on several hosts that loses workers, agents, cables and hosts again and again, and is the network of one
device at its end. What each loss costs is printed.

``APPORTION_TIMES`` is how often each of them is done: 10 in full.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from driven_hosts import DrivenRun, cut, driven, from_one_device
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("nothing_is_left_on_a_host"),
]
HOSTS = 3
TIMES = int(os.environ.get("APPORTION_TIMES", "2"))
TWO = "b:2", "c:2"
EXACT = 1e-10
AGAIN = "all workers are started again"
NOTICED, GIVEN_UP = 3.0, 9.0
"""The seconds until a loss is noticed (2 s, and 1 s), and until the others go on (its grace and 2 s more)."""


def times(run: DrivenRun, words: str) -> int:
    """How often something was told."""
    return sum(words in fault["cause"] for fault in run.faults())


def after(run: DrivenRun, began: float, words: str) -> float:
    """The seconds until it was told again."""
    known = times(run, words)
    run.until(lambda: times(run, words) > known)
    return time.monotonic() - began


def goes_on(run: DrivenRun, began: float) -> float:
    """The seconds until the second step from now on: the first may have been under way."""
    step = run.step
    run.until(lambda: run.step > step + 1)
    return time.monotonic() - began


def is_back(run: DrivenRun, losses: int) -> None:
    """Waits until a host was taken in again after each loss of one, and the run has made steps with it."""
    run.until(lambda: times(run, "takes part again") == losses)
    run.until_step(run.step + 5)


def ended(run: DrivenRun, project: Path) -> float:
    """Ends the run as Ctrl-C does, and returns how far its network is from that of one device."""
    return from_one_device(project, run.interrupt())


def tell(what: str, seconds: list[float]) -> None:
    print(f"{what}: median {median(seconds):.2f} s, worst {max(seconds):.2f} s, {len(seconds)} times")


@pytest.mark.parametrize("strategy", ["data_parallel", "pipeline_parallel(microbatches=1)"])
def test_workers_that_are_stopped(hosts: SshHosts, tmp_path: Path, strategy: str) -> None:
    seconds = []
    given = {"steps": 100_000, "strategy": strategy, "dropout": 0.0, "max_restarts": 1000}
    with driven(hosts, tmp_path, *TWO, **given) as run:
        run.until_begun(4)
        for number in range(TIMES):
            rank = number % 4
            seconds.append(run.kill("b" if rank < 2 else "c", rank, signal.SIGSTOP))
        assert len(run.faults()) == TIMES
        assert all(f"rank {n % 4}" in fault["cause"] for n, fault in enumerate(run.faults()))
        assert ended(run, tmp_path) < EXACT
    tell("a worker that is stopped, until the next step", seconds)
    assert max(seconds) < NOTICED + 2.0


def wipe(hosts: SshHosts, name: str) -> Callable[[], None]:
    hosts.wipe(name)
    return lambda: None


def stop_agent(hosts: SshHosts, name: str) -> Callable[[], None]:
    """Stops the agent of a host; returns what lets it go on."""
    (agent,) = [
        pid
        for pid, words in hosts.processes(name).items()
        if "-m apportion.runtime.hosts.agent" in words and " -c " not in words
    ]
    os.kill(agent, signal.SIGSTOP)
    return lambda: os.kill(agent, signal.SIGCONT)


def cut_off(hosts: SshHosts, name: str) -> Callable[[], None]:
    """Cuts the cable of a host; returns what mends it."""
    held = cut(hosts, name)
    held.__enter__()
    return lambda: held.__exit__(None, None, None)


@pytest.mark.parametrize("strategy", ["data_parallel", "pipeline_parallel(microbatches=1)"])
@pytest.mark.parametrize("act", [wipe, stop_agent, cut_off], ids=["killed", "agent stopped", "cable cut"])
def test_hosts_that_are_lost_and_come_back(
    hosts: SshHosts, tmp_path: Path, act: Callable[[SshHosts, str], Callable[[], None]], strategy: str
) -> None:
    """By turns the first and the second; until then the other one goes on alone."""
    noticed, went_on = [], []
    given = {"steps": 100_000, "strategy": strategy, "dropout": 0.0, "pause": 0.02, "max_restarts": 1000}
    with driven(hosts, tmp_path, *TWO, **given, checkpoint_every="20 steps") as run:
        run.until_begun(4)
        for number in range(TIMES):
            name, began = "bc"[number % 2], time.monotonic()
            undo = act(hosts, name)
            try:
                if act is not wipe:
                    noticed.append(after(run, began, "has said nothing"))
                run.until(lambda name=name, n=number // 2: times(run, f"host {name} is lost with") > n)
                went_on.append(goes_on(run, began))
            finally:
                undo()
            is_back(run, number + 1)
        told = [fault["cause"] for fault in run.faults() if fault["action"] != AGAIN]  # which follows from a loss
        assert all("rank" in cause and "host" in cause for cause in told)
        assert ended(run, tmp_path) < EXACT
    if noticed:
        tell("suspected", noticed)
    tell("the others go on", went_on)
    assert max(noticed, default=0.0) < NOTICED
    assert max(went_on) < GIVEN_UP


@pytest.mark.parametrize("seconds", [20])
def test_a_cable_that_is_cut_for_longer_than_the_grace(hosts: SshHosts, tmp_path: Path, seconds: int) -> None:
    """The side with the driver goes on alone, and the other one is taken in again."""
    given = {"steps": 100_000, "dropout": 0.0, "pause": 0.02, "max_restarts": 1000}
    with driven(hosts, tmp_path, *TWO, **given) as run:
        run.until_begun(4)
        for number in range(max(1, TIMES // 2)):
            with cut(hosts, "bc"[number % 2]):
                time.sleep(seconds)  # what is tested is how long it is cut
            is_back(run, number + 1)
        assert ended(run, tmp_path) < EXACT
