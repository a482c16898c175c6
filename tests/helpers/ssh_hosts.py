"""Hosts that ssh reaches: a real sshd in each of some network namespaces, with keys and a configuration of their own.

The driver runs in the first of them. What a host has left is looked for among the processes of its namespace, and in
the folder that stands for its /tmp.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apportion

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "lib"


def cannot() -> str | None:
    """Why there can be no such hosts here, or None."""
    why: str | None = _benchmarks("sshd").cannot() or _benchmarks("hosts").cannot()
    return why


def _benchmarks(name: str) -> Any:
    """A module of the benchmarks."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@dataclass
class SshHosts:
    """Some hosts, by their names ``a``, ``b`` and so on."""

    made: Any
    """The namespaces (``benchmarks/lib/hosts.py``)."""
    folder: Path
    """Where keys, the configuration and the folders of the hosts are."""
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def private(self) -> Path:
        """A folder that is another one on every host but the first."""
        return self.folder / "private"

    @property
    def names(self) -> list[str]:
        return list(self.servers)

    def launcher(self, *hosts: str, **fields: Any) -> apportion.ssh:
        """``ssh`` for these hosts, with their configuration."""
        return apportion.ssh(*hosts, options=("-F", str(self.folder / "config")), **fields)

    def command(self, command: Sequence[str], host: str = "a", folder: Path | None = None) -> list[str]:
        """The same, run in the namespace of a host; in a folder on the disk of that, where one is given."""
        if host == self.names[0] or folder is None:
            return ["ip", "netns", "exec", self._namespace(host), *command]
        return ["nsenter", "-t", str(self.servers[host].pid), "-m", "-n", f"--wd={folder}", *command]

    def on_disk(self, host: str, path: Path) -> Path:
        """Where this process finds what a host calls by this path."""
        return Path(f"/proc/{self.servers[host].pid}/root{path}")

    def start(self, command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Starts a driver on host a, in a folder."""
        return subprocess.Popen(
            self.command(command),
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self, host: str) -> dict[int, str]:
        """What runs on a host and was not there at first: the agents, what they started, and sshd's part of them."""
        told = subprocess.run(["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True).stdout
        found = {}
        for pid in map(int, told.split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if pid != self.servers[host].pid and not zombie:
                found[pid] = words
        return found

    def wipe(self, host: str) -> None:
        """Kills all processes of a host but its sshd, and removes the folders of its runs, as a restart of it does."""
        while left := self.processes(host):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for path in (self.folder / host).iterdir():
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def small_disk(self, host: str) -> Iterator[None]:
        """Has 64 KiB where a host keeps the folders of runs; not for the first one, whose disk is the driver's."""
        inside = ["nsenter", "-t", str(self.servers[host].pid), "-m"]
        small = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(self.folder / host)]
        subprocess.run([*inside, *small], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", "-l", str(self.folder / host)], check=True)

    def left(self) -> list[str]:
        """What is left of any run on any host."""
        files = [str(path) for name in self.names for path in (self.folder / name).iterdir()]
        return files + [f"{name}: {pid} {words}" for name in self.names for pid, words in self.processes(name).items()]

    def _namespace(self, host: str) -> str:
        return str(self.made.names[self.names.index(host)])


@contextmanager
def ssh_hosts(folder: Path, count: int = 2) -> Iterator[SshHosts]:
    """So many hosts that ssh reaches from the first."""
    path = Path(apportion.__file__).parents[1]
    environment = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": folder / "inductor"}
    with (
        _benchmarks("hosts").several_hosts((1,) * count) as made,
        _benchmarks("sshd").sshds(made, folder, environment) as servers,
    ):
        yield SshHosts(made, folder, servers)
