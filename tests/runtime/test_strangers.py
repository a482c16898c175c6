"""Ten thousand strangers at every port that a run opens: none gets in, nothing dies, the result has the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from launched_runs import losses
from served import save_net, serving
from ssh_hosts import SshHosts
from strangers import Told, strangers

pytestmark = [
    pytest.mark.processes, pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(1200),
    pytest.mark.usefixtures("cold_programs"),  # whose ports they are is told by the programs' names
]  # fmt: skip
HOSTS = 2

CONNECTIONS = 10_000
KILLS = 6
SECONDS = 500
WORK = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def examples():
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss(outputs, targets):
    if os.path.exists("attacked") and not os.path.exists("enough"):
        time.sleep(0.1)  # until there have been enough strangers
    return nn.functional.cross_entropy(outputs, targets)


workload = apportion.Workload(
    model=network,
    data=examples,
    loss=loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    batch_size=16,
    steps=400,
)
"""
DRIVER = """
import sys

import apportion
from apportion.core.value import parse
from work import workload

if __name__ == "__main__":
    launcher = parse(sys.argv[2], "apportion.runtime.launch")
    apportion.train(workload, sys.argv[1], launcher=launcher, run_dir="run", check=False)
"""


@dataclass(frozen=True)
class Run:
    """A training, and where its processes run."""

    strategy: str
    launcher: str
    ranks: tuple[int, ...] = ()
    """The ranks that torchrun starts on each host; empty: the launcher starts them."""

    def commands(self, hosts: SshHosts, port: int) -> list[list[str]]:
        """What is started on each host."""
        launcher = self.launcher
        if launcher == "ssh":
            launcher = str(hosts.launcher("a", "b:2", workers=1, threads=1))
        program = ["driver.py", self.strategy, launcher]
        if not self.ranks:
            return [hosts.command([sys.executable, *program])]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.ranks)}"]
        torchrun += [f"--master-addr={hosts.made.addresses[0]}", f"--master-port={port}"]
        return [
            hosts.command([*torchrun, f"--node-rank={node}", f"--nproc-per-node={many}", *program], name)
            for node, (many, name) in enumerate(zip(self.ranks, "ab", strict=False))
        ]


RUNS = {
    "local": Run("data_parallel", "local(workers=2, threads=1)"),
    "local, fully_sharded": Run("fully_sharded", "local(workers=2, threads=1)"),
    "local, servers": Run("parameter_server(servers=1)", "local(workers=1, threads=1)"),
    "torchrun": Run("data_parallel", "env(device='cpu')", (2,)),
    "torchrun, a rank each": Run("data_parallel", "env(device='cpu')", (1, 1)),
    "torchrun, two ranks and one": Run("data_parallel", "env(device='cpu')", (2, 1)),
    "torchrun, fully_sharded": Run("fully_sharded", "env(device='cpu')", (1, 1)),
    "ssh": Run("data_parallel", "ssh"),
}
WITHOUT_A_PORT = {"local", "local, fully_sharded", "local, servers", "torchrun"}
"""The runs that listen nowhere."""


def digest(folder: Path) -> str:
    """The bits of what a run has trained, and of every loss on the way."""
    found = hashlib.sha256()
    for path in sorted((folder / "run" / "checkpoints" / "latest").resolve().glob("*.safetensors")):
        found.update(path.read_bytes())
    found.update(json.dumps(losses(folder / "run")).encode())
    return found.hexdigest()


def trained(hosts: SshHosts, run: Run, folder: Path, watch: Callable[[], bool]) -> str:
    """Trains to the end, which ``watch``, called now and then, must not find to have come too early."""
    folder.mkdir(exist_ok=True)
    (folder / "work.py").write_text(WORK)
    (folder / "driver.py").write_text(DRIVER)
    given = {"APPORTION_SECRET_FILE": hosts.made.secret, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for command in run.commands(hosts, hosts.made.port()):
            with open(folder / f"said-{len(processes)}", "wb") as said:
                process = subprocess.Popen(
                    command, cwd=folder, env={**os.environ, **given}, stdout=said, stderr=said, start_new_session=True
                )
            stack.callback(end, process)
            processes.append(process)
        until = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            if watch():
                (folder / "enough").touch()
            time.sleep(0.05)
        said = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("said-*")))
        assert [process.poll() for process in processes] == [0] * len(processes), said
    return digest(folder)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def attacked(
    hosts: SshHosts, run: Run, folder: Path, places: Sequence[str], meanwhile: Callable[[], bool] = lambda: True
) -> tuple[str, list[Told]]:
    """Trains while strangers of each of these hosts connect to all ports there. ``meanwhile``: called now and then,
    until it returns True."""
    folder.mkdir()
    (folder / "attacked").touch()
    with ExitStack() as stack:
        count = CONNECTIONS // len(places)
        sent = [stack.enter_context(strangers(folder, count=count, within=hosts.command([], name))) for name in places]
        began = time.monotonic()
        found = trained(
            hosts,
            run,
            folder,
            lambda: (meanwhile() and all(one.enough() for one in sent)) or time.monotonic() - began > SECONDS / 2,
        )
        return found, [one.end() for one in sent]


@pytest.mark.parametrize("name", RUNS)
def test_strangers_change_nothing_of_a_run(hosts: SshHosts, tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    several = len(run.ranks) > 1 or run.launcher == "ssh"
    quiet = trained(hosts, run, tmp_path / "quiet", lambda: False)
    if name in WITHOUT_A_PORT:
        with strangers(tmp_path, count=1, within=hosts.command([], "a")) as watching:
            assert trained(hosts, run, tmp_path / "watched", lambda: False) == quiet
            assert watching.end().ports == {}
        return
    found, told = attacked(hosts, run, tmp_path / "attacked", ["a", "b"] if several else ["a"])
    for place, one in zip("ab", told, strict=False):
        for port, words in one.ports.items():
            print(f"{name}\thost {place}\t{port}\t{one.made.get(port, 0)} connections\t{words[:90]}")
        print(f"{name}\thost {place}\t{one.kinds}\t{one.answered}")
        assert one.ports, "it listens somewhere"
        assert one.everywhere() == [], "nowhere at all addresses"
    assert found == quiet, "the same bits"
    assert sum(one.connections for one in told) >= CONNECTIONS
    assert [one.answered for one in told] == [{}, {}], "nobody was told more than a greeting"
    assert all(port.startswith(hosts.made.addresses) for one in told for port in one.ports)


@dataclass
class Killer:
    """Kills a rank of a host, or the spare there, now and then."""

    hosts: SshHosts
    name: str
    kills: int = 0
    last: float = 0.0

    def __call__(self) -> bool:
        """Returns True once there were enough."""
        forked = [pid for pid in self.hosts.processes(self.name) if self._is_forked(pid)]
        if self.kills < KILLS and forked and time.monotonic() - self.last > 3.0:
            self.last = time.monotonic()
            os.kill(forked[self.kills % len(forked)], signal.SIGKILL)
            self.kills += 1
        return self.kills == KILLS

    def _is_forked(self, pid: int) -> bool:
        """True for what was forked from the template; that is a child of the agent."""
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            return b"runtime.spawn.template" in Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            return False


def test_strangers_change_nothing_of_a_run_whose_workers_are_killed(hosts: SshHosts, tmp_path: Path) -> None:
    """The ports are other ones after each loss."""
    run, killer = RUNS["ssh"], Killer(hosts, "b")
    quiet = trained(hosts, run, tmp_path / "quiet", lambda: False)
    found, told = attacked(hosts, run, tmp_path / "attacked", ["a", "b"], killer)
    assert killer.kills == KILLS
    assert found == quiet, "the same bits"
    assert sum(one.connections for one in told) >= CONNECTIONS
    assert [one.answered for one in told] == [{}, {}], "nobody was told more than a greeting"
    assert [one.everywhere() for one in told] == [[], []], "nowhere at all addresses"


def test_strangers_change_nothing_of_a_server(tmp_path: Path) -> None:
    save_net(tmp_path / "1.onnx", 1)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    with serving(tmp_path, "1.onnx", "--deadline", "10s") as server:
        before = server.infer("m1", x)
        assert before[0] == 200
        with strangers(tmp_path, count=CONNECTIONS, root=server.process.pid) as sent:
            until = time.monotonic() + SECONDS
            while not sent.enough() and time.monotonic() < until:
                status, told = server.infer("m1", x)
                assert (status, told["outputs"]) == (200, before[1]["outputs"])
            told = sent.end()
        assert told.connections >= CONNECTIONS
        assert list(told.ports) == [f"127.0.0.1:{server.port}"]
        print(told.ports, told.kinds)
        assert server.process.poll() is None
        assert server.infer("m1", x)[1]["outputs"] == before[1]["outputs"]
