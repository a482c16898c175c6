"""Nobody is taken for lost who is only slow: loaders that stall, long evaluations, a driver that is stopped, and cores
that are busy with something else. Real sshds in network namespaces.

``APPORTION_ALARM_MINUTES=30`` makes it last so long, and has the driver stopped for 60 s instead of 20 s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driven_hosts import WORK, differences, driven, weights
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left_on_a_host"),
]
HOSTS = 2
MINUTES = float(os.environ.get("APPORTION_ALARM_MINUTES", "2"))
STEPS_A_MINUTE = 250
"""The steps that are made in a minute, about, with what holds them up."""
STOPPED_SECONDS = 60.0 if MINUTES >= 30 else 20.0
MOST_SECONDS = 60 * (3 * MINUTES + 3)
"""The most seconds that a run takes on a machine that does other things besides."""
_WORK = WORK.replace(
    "workload = apportion.Workload(",
    """
class Stalling(torch.utils.data.Dataset):
    "The same, whose first example takes five seconds at every fourth time that a process is asked for it."

    def __init__(self):
        self.examples, self.asked = examples(), 0

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        if index == 0:
            self.asked += 1
            if self.asked % 4 == 2:
                print("stalls", flush=True)
                time.sleep(5.0)
        return self.examples[index]


def held_out():
    return torch.utils.data.Subset(examples(), range(16))


def accuracy(outputs, targets):
    print("evaluates", flush=True)
    time.sleep(8.0)
    return (outputs.argmax(1) == targets).double().mean()


evaluation = apportion.Evaluation(data=held_out, metrics={"accuracy": accuracy}, every=8.0)
workload = apportion.Workload(
    evaluation=evaluation,""",
).replace("data=examples", "data=Stalling")


@pytest.mark.timeout(2 * MOST_SECONDS)
def test_what_is_only_slow_raises_no_alarm_and_the_bits_are_those_of_the_run_that_nothing_held_up(
    hosts: SshHosts, tmp_path: Path
) -> None:
    projects, steps = (tmp_path / "calm", tmp_path / "held_up"), round(MINUTES * STEPS_A_MINUTE)
    for project in projects:
        project.mkdir()
    with driven(hosts, projects[0], "a:1", "b:1", steps=steps, pause=0.0) as run:
        assert run.end(MOST_SECONDS)["step"] == steps
    with (
        driven(hosts, projects[1], "a:1", "b:1", steps=steps, pause=0.05, work=_WORK, loaders=1) as run,
        busy_cores(),
    ):
        run.until(lambda: run.step >= steps // 3, MOST_SECONDS)
        with stopped(run.process.pid):
            threading.Event().wait(STOPPED_SECONDS)  # what is tested is that nothing happens meanwhile
        assert run.end(MOST_SECONDS)["step"] == steps
        said = "\n".join(run.said)
        assert said.count("stalls") >= 2 * MINUTES
        assert said.count("evaluates") >= MINUTES
        assert run.faults() == [], run.faults()
    assert differences(weights(projects[0]), weights(projects[1])) == {}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Has a process stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Has each of the two cores that the hosts are on busy with something else besides."""
    spin = [sys.executable, "-c", "while True: pass"]
    cores = sorted(os.sched_getaffinity(0))[:2]
    busy = [subprocess.Popen(["taskset", "-c", str(core), *spin]) for core in cores]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
