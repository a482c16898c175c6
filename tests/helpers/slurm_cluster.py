"""A Slurm cluster of two nodes: a real slurmctld and two slurmds in network namespaces, node1 and node2.

What a user types at a login node runs on node1. What a job has left is looked for among the processes of the
namespaces. Everything that the daemons write is in one folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launched_runs import on_host

import apportion

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "lib"
START_SECONDS = 20.0
END_SECONDS = 10.0
_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "sbatch": "slurm-client"}
_CONFIGURATION = """
ClusterName=apportion
SlurmctldHost=node1({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%h.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%h.log
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName=node1 NodeAddr={addresses[0]} CPUs=2
NodeName=node2 NodeAddr={addresses[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
"""Names a kind of control groups, so that slurmd does not look for one; nothing of them is used."""
_HOSTS = "127.0.0.1 localhost\n127.0.1.1 {own}\n{others}"
"""The table of hosts as Debian writes it: a host's own name stands for an address that no other host reaches."""


def cannot() -> str | None:
    """Why there can be no cluster here, or None."""
    for program, package in _PROGRAMS.items():
        if _program(program) is None:
            return f"needs {program}: apt-get install {package}"
    why: str | None = hosts_module().cannot()
    return why


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def hosts_module() -> Any:
    """The module that makes hosts of namespaces."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    import hosts

    return hosts


@dataclass
class SlurmCluster:
    """Two nodes of two cores each, whose files are the same."""

    made: Any
    """The namespaces (``benchmarks/lib/hosts.py``)."""
    folder: Path
    """Where the configuration, the logs and the state of the daemons are."""
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell has set on node1, and no secret."""
        own = {name: text for name, text in os.environ.items() if not name.startswith(("APPORTION_SECRET", "SLURM_"))}
        source = Path(apportion.__file__).parents[1]
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(source)}

    def start(self, command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Starts what a user types on node1, in a folder."""
        return subprocess.Popen(
            self._on(0, command),
            cwd=folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, *command: str) -> str:
        """What one of Slurm's own commands answers."""
        done = subprocess.run(
            self._on(0, command), env=self.environment, capture_output=True, text=True, timeout=END_SECONDS
        )
        return done.stdout.strip()

    def processes(self, node: int) -> dict[int, str]:
        """The command of every process on a node (0 or 1) that is not a daemon of Slurm's."""
        told = subprocess.run(["ip", "netns", "pids", self.made.names[node]], capture_output=True, text=True).stdout
        found = {}
        for pid in map(int, told.split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if not zombie and "slurmctld" not in words and "slurmd" not in words.split("/")[-1]:
                found[pid] = words
        return found

    def left(self) -> list[str]:
        """What is left of any job on any node."""
        return [f"node{node + 1}: {pid} {words}" for node in (0, 1) for pid, words in self.processes(node).items()]

    def logs(self) -> str:
        """What the daemons have written."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log"))

    def _on(self, node: int, command: Sequence[str]) -> list[str]:
        """The same, on a node."""
        return on_host(self.made.names[node], f"node{node + 1}", self.folder / f"hosts{node}", command)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster whose two nodes are idle; all of it is gone afterwards."""
    with ExitStack() as stack:
        made = stack.enter_context(hosts_module().several_hosts((2, 2)))
        found = SlurmCluster(made, folder)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, addresses=made.addresses))
        (folder / "cgroup.conf").write_text(_CGROUPS)
        for node in (0, 1):
            (folder / f"node{node + 1}").mkdir()
            others = f"{made.addresses[1 - node]} node{2 - node}\n"
            (folder / f"hosts{node}").write_text(_HOSTS.format(own=f"node{node + 1}", others=others))
        stack.callback(_end, found)
        for node, program in ((0, "slurmctld"), (0, "slurmd"), (1, "slurmd")):
            command = found._on(node, [str(_program(program)), "-D"])
            quiet = subprocess.DEVNULL  # the same is in its log
            found.daemons.append(subprocess.Popen(command, env=found.environment, stdout=quiet, stderr=quiet))
        end = time.monotonic() + START_SECONDS
        while (told := found.ask("sinfo", "--noheader", "--format=%t %D")) != "idle 2":
            if time.monotonic() > end:
                raise AssertionError(f"the nodes are not idle but {told!r}:\n{found.logs()}")
            time.sleep(0.05)
        yield found


def _end(found: SlurmCluster) -> None:
    """Ends the daemons, slurmctld last; whatever they have started ends with the namespaces."""
    for daemon in reversed(found.daemons):
        daemon.terminate()
        try:
            daemon.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
