"""Verbs that return a value, on hosts that ssh reaches: real sshds in network namespaces, real failures, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import SECONDS
from conftest import Eventually, Within
from launched_checks import Told
from ssh_checks import checked_by_ssh, start_checks
from ssh_hosts import SshHosts

pytestmark = [pytest.mark.processes, pytest.mark.serial, pytest.mark.usefixtures("nothing_is_left_on_a_host")]
HOSTS = 2

EXACT = 1e-10
WORK = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def examples():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


workload = apportion.Workload(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    batch_size=16,
    steps=12,
)
"""


def checked(hosts: SshHosts, folder: Path, *checks: tuple[str, str], names: Sequence[str] = ("a", "b")) -> list[Told]:
    return checked_by_ssh(hosts, names, checks, folder)


@pytest.mark.slow
def test_a_proof_of_two_hosts_comes_back_and_a_planted_mistake_is_found(hosts: SshHosts, tmp_path: Path) -> None:
    right, wrong = checked(hosts, tmp_path, ("data_parallel", "mlp"), ("planted:a_little_too_much", "mlp"))
    assert not right.raised
    assert right.sentence.startswith("data_parallel on 2 workers of 2 hosts trains the same network as one device")
    assert right.holds
    assert right.worst <= EXACT
    assert not wrong.raised
    assert not wrong.holds
    assert "does not train the same network as one device" in wrong.sentence


@pytest.mark.slow
def test_what_cannot_be_proved_there_is_refused_with_the_words_of_the_ranks(hosts: SshHosts, tmp_path: Path) -> None:
    checks = [
        ("hogwild", "mlp"), ("single_device", "mlp"), ("data_parallel", "raises"), ("data_parallel", "killed"),
        ("data_parallel", "is not built"),
    ]  # fmt: skip
    shared, alone, raises, killed, unbuilt = checked(hosts, tmp_path, *checks)
    assert shared.raised.startswith("ValueError: hogwild keeps its weights in memory that all of its workers share")
    assert alone.raised.startswith("ValueError: single_device runs in one process, and 2 ranks are running")
    assert raises.raised == "WorkerFailed: rank 1 on host b: RuntimeError: a bad row"
    assert killed.raised.startswith("WorkerFailed: rank 1 on host b was killed by SIGKILL")
    assert "resume=True" not in killed.raised
    assert unbuilt.raised.startswith("WorkerFailed: rank 1 on host b: RuntimeError: not here")
    assert max(told.seconds for told in (shared, alone, raises, killed, unbuilt)) < 90, "nobody waits for whom is gone"


@pytest.mark.slow
def test_a_verb_that_is_interrupted_or_whose_host_is_lost_ends_at_once(
    hosts: SshHosts, tmp_path: Path, within: Within, eventually: Eventually
) -> None:
    for victim in ("driver", "sshd"):
        checks = [("data_parallel", "mlp")] * (20 if victim == "driver" else 1)
        with start_checks(hosts, ("a", "b"), checks, tmp_path, steps=200) as driver:
            try:
                what, least = ("an agent runs", 3) if victim == "driver" else ("ranks run", 5)
                eventually(lambda: len(hosts.processes("b")) >= least, within=60, what=what)  # noqa: B023
                if victim == "driver":
                    driver.send_signal(signal.SIGINT)
                for pid, words in hosts.processes("b").items():
                    if victim == "sshd" and words.startswith("sshd: "):
                        os.kill(pid, signal.SIGKILL)
                with within(20, "the end"):
                    _, err = driver.communicate(timeout=SECONDS)
            finally:
                driver.kill()
        if victim == "driver":
            assert "KeyboardInterrupt" in err
        else:
            told = json.loads((tmp_path / "told.json").read_text())[0]["raised"]
            assert told.startswith("WorkerFailed: host b: the connection was lost"), told
            assert "resume=True" not in told


def command(hosts: SshHosts, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command on the first host that has ended."""
    path = f"{hosts.folder / 'bin'}:{os.environ['PATH']}"
    given = {"PATH": path, "XDG_CACHE_HOME": str(project / "cache"), "OMP_NUM_THREADS": "1"}
    process = hosts.start([sys.executable, "-m", "apportion", *words], project, **given)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(textwrap.dedent(WORK))
    return tmp_path


@pytest.mark.slow
def test_the_commands_take_hosts(hosts: SshHosts, project: Path) -> None:
    where = ["--hosts", "a,b", "--workers", "1", "--json"]
    done = command(hosts, project, "check", "work.py:workload", "--strategy", "data_parallel", "--steps", "2", *where)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["holds"], told["workers"], told["hosts"]) == (True, 2, 2)
    strategies = ["--strategy", "data_parallel", "--strategy", "local_sgd"]
    done = command(
        hosts, project, "compare", "work.py:workload", *strategies, "--steps", "6", "--out", "t.json", *where
    )
    assert done.returncode == 0, done.stderr
    rows = {row["strategy"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {"single_device", "data_parallel", "local_sgd"}
    assert rows["single_device"]["times_one_device"] == 1.0
    assert rows["data_parallel"]["workers"] == 2
    assert rows["data_parallel"]["launcher"].startswith("ssh('a', 'b', workers=1")
    assert all(row["steps"] == 6 for row in rows.values())
    assert json.loads((project / "t.json").read_text()) == json.loads(done.stdout)
