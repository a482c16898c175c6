"""A Ray cluster of two nodes or more: real raylets in network namespaces, node1, node2, from an environment of its own.

What a user types runs on node1. Ray's processes find Ray in .venv/ray (tests/ray.txt) and neither apportion nor torch:
the interpreter of the ranks is another one. Each node has its own /tmp/ray, a folder of the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launched_drivers import TALKING
from slurm_cluster import hosts_module

import apportion

RAY = Path(sys.prefix) / "ray"
SOURCE = Path(apportion.__file__).parents[1]
SESSIONS = Path("/tmp/ray")
PORT = 6379
START_SECONDS, END_SECONDS = 60.0, 20.0
OWN = (
    *("ray.scripts.scripts", "/gcs_server", "/raylet", "autoscaler/_private/monitor.py", "log_monitor.py"),
    *("dashboard/dashboard.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE", "default_worker.py"),
    *("dashboard/agent.py", "runtime_env/agent", "setup_worker.py"),
)
"""What the commands of Ray's own processes hold."""
_HOSTS = "127.0.0.1 localhost\n{nodes}"
_ON_NODE = 'hostname {name} && mount --bind {table} /etc/hosts && mount --bind {sessions} {there} && exec "$@"'


def cannot() -> str | None:
    """Why there can be no cluster here, or None."""
    if not (RAY / "ray").is_dir():
        return f"needs Ray in {RAY}: scripts/test slow installs it there"
    why: str | None = hosts_module().cannot()
    return why


def write_project(folder: Path) -> None:
    """Writes a user's files, and an interpreter that has apportion and torch, and not Ray."""
    (folder / "mine.py").write_text(TALKING)
    (folder / "python").write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)


@dataclass
class RayCluster:
    """Nodes, whose files are the same but for /tmp/ray."""

    made: Any
    """The namespaces (``benchmarks/lib/hosts.py``)."""
    folder: Path
    """Where the logs and the sessions of the nodes are."""
    settings: dict[str, str]
    """What the environment of every process of Ray's says besides, its drivers' too."""
    python: str
    """The interpreter of Ray's own processes."""
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def folders(self) -> Path:
        """Where both nodes keep the folders of runs."""
        return self.folder / "folders"

    @property
    def address(self) -> str:
        return f"{self.made.addresses[0]}:{PORT}"

    def environment(self, *path: Path) -> dict[str, str]:
        """What a user's shell has set, with Ray and these folders on the path of Python."""
        own = {name: text for name, text in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "SSH_"))}
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        places = {"TMPDIR": str(self.folders), "RAY_TMPDIR": str(SESSIONS.parent)}
        return {**own, **quiet, **places, **self.settings, "PYTHONPATH": os.pathsep.join(map(str, (RAY, *path)))}

    def start(self, command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Starts what a user types on node1, in a folder, with apportion and Ray on its path."""
        given = {**self.environment(SOURCE), **environment}
        return subprocess.Popen(
            self.command(0, command), cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def train(
        self, project: Path, workload: str, fields: str = "workers=1", *options: str, **given: str
    ) -> subprocess.Popen[str]:
        """Starts a training on the cluster, by the interpreter of a folder that ``write_project`` has made."""
        launcher = f"ray({fields}, python='{project}/python')"
        words = [workload, "data_parallel", "--launcher", launcher, "--run-dir", "run", "--no-check"]
        return self.start([sys.executable, "-m", "apportion", "train", *words, *options], project, **given)

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """The same, on a node."""
        sessions = self.folder / f"node{node + 1}"
        text = _ON_NODE.format(name=f"node{node + 1}", table=self.folder / "hosts", sessions=sessions, there=SESSIONS)
        return ["ip", "netns", "exec", self.made.names[node], "unshare", "--uts", "sh", "-c", text, "sh", *command]

    def all_processes(self, node: int) -> dict[int, str]:
        """The command of every process on a node, by its number from 0 on."""
        told = subprocess.run(["ip", "netns", "pids", self.made.names[node]], capture_output=True, text=True).stdout
        found = {}
        for pid in map(int, told.split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if not zombie:
                found[pid] = words
        return found

    def processes(self, node: int) -> dict[int, str]:
        """The same, of those that are none of Ray's own."""
        found = self.all_processes(node)
        return {pid: words for pid, words in found.items() if not any(own in words for own in OWN)}

    def left(self) -> list[str]:
        """What is left of any run on any node."""
        return [
            f"node{node + 1}: {pid} {words}"
            for node in range(len(self.daemons))
            for pid, words in self.processes(node).items()
        ]

    def logs(self) -> str:
        """What the daemons have written."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log"))


@contextmanager
def ray_cluster(
    folder: Path, *, cores: Sequence[int] = (2, 2), with_torch: bool = False, **settings: str
) -> Iterator[RayCluster]:
    """A cluster whose nodes are there, with so many cores each; all of it is gone afterwards. ``with_torch``: Ray's own
    processes find what the tests find; ``settings``: variables of its processes."""
    with ExitStack() as stack:
        made = stack.enter_context(hosts_module().several_hosts(tuple(cores)))
        python = sys.executable if with_torch else os.path.realpath(sys.executable)
        found = RayCluster(made, folder, settings, python)
        nodes = "".join(f"{address} node{number + 1}\n" for number, address in enumerate(made.addresses))
        (folder / "hosts").write_text(_HOSTS.format(nodes=nodes))
        SESSIONS.mkdir(exist_ok=True)
        found.folders.mkdir()
        stack.callback(_end, found)
        for node, many in enumerate(cores):
            (folder / f"node{node + 1}").mkdir()
            head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            where = head if node == 0 else [f"--address={found.address}"]
            own = [f"--node-ip-address={made.addresses[node]}", f"--num-cpus={many}", "--block"]
            memory = ["--object-store-memory=100000000", "--memory=4000000000"]
            command = [python, "-m", "ray.scripts.scripts", "start", *where, *own, *memory]
            with open(folder / f"node{node + 1}.log", "wb") as log:
                given = found.environment(*([SOURCE] if with_torch else []))
                daemon = subprocess.Popen(found.command(node, command), env=given, stdout=log, stderr=log)
            found.daemons.append(daemon)
            _await(found, node)
        yield found


def _await(found: RayCluster, node: int) -> None:
    """Waits until a node says that it is there."""
    log, end = found.folder / f"node{node + 1}.log", time.monotonic() + START_SECONDS
    while "Ray runtime started" not in log.read_text():
        if time.monotonic() > end or found.daemons[-1].poll() is not None:
            raise AssertionError(f"Ray does not start:\n{found.logs()}")
        time.sleep(0.05)


def _end(found: RayCluster) -> None:
    """Ends the daemons, the head last; whatever they have started ends with the namespaces."""
    for daemon in reversed(found.daemons):
        daemon.terminate()
        try:
            daemon.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    with suppress(OSError):  # it was there before, and is not empty
        SESSIONS.rmdir()
