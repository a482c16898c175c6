"""slurm: an agent on each node of an allocation, started by srun, starts that node's ranks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from apportion.comm.network.slurm import allocated, environment_of_steps
from apportion.errors import ApportionError
from apportion.runtime.agents.agent_command import HOST_CORES, REACHED_FROM, agent_command
from apportion.runtime.agents.hosts_launcher import HostsLauncher, RunHost, as_texts

IMMEDIATE_SECONDS = 20
"""The seconds in which Slurm has to make a step."""
_END_SECONDS = 2.0
"""The seconds in which srun ends a step that is to be ended."""
_OPTIONS = (
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
    "--overlap",  # the shell that salloc gives may be a step that has all cores
    "--cpu-bind=none",  # all cores of the job there, and not the one that a task of its own would be bound to
    "--mpi=none",
    "--unbuffered",  # else bytes wait in Slurm until a line ends
    "--kill-on-bad-exit=1",
    f"--immediate={IMMEDIATE_SECONDS}",
    "--quiet",
)
"""The options of srun; those of the user stand behind them, and the last value of an option counts."""
_CANCELLED = re.compile(r"CANCELLED AT \S+(?: (DUE TO [A-Z ]+))?")
_LOST = re.compile(r"[Nn]ode failure|io failure|io error|Timed out waiting for job step|Connection reset")
_NO_REASON = re.compile(r"task 0: |lacks support for cpu binding|forcing job termination|Job step aborted")
"""What srun says of every end, or of nothing."""
_CURE = "is the node up, and has the job what is asked for? options= gives srun other options"
_ON_NODE = f'{REACHED_FROM}=$SLURM_LAUNCH_NODE_IPADDR {HOST_CORES}=$SLURM_CPUS_ON_NODE exec "$@"'


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Slurm(HostsLauncher):
    """Worker processes on all nodes of the allocation of Slurm's that this process runs in: ``slurm()`` in a batch
    file. ``workers=None``: as many on each node as the job has tasks there, where it has asked for tasks."""

    options: tuple[str, ...] = ()
    """Options for srun, as ``("--gres=gpu:2",)``."""

    own_words: ClassVar[tuple[str, ...]] = ("srun: ", "slurmstepd")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", as_texts("options", self.options))

    def parsed(self) -> list[RunHost]:
        """Returns the nodes, the driver's own first. Raises ValueError outside an allocation."""
        found = allocated(os.environ)
        return [RunHost(node, self.workers if self.workers is not None else tasks) for node, tasks in found]

    def command(self, host: RunHost, job: str) -> list[str]:
        """Returns the command that starts the agent of a node, and is the connection to it. ``job``: the number of the
        job."""
        where = [f"--jobid={job}", f"--nodelist={host.destination}", f"--job-name={_step_name()}"]
        return ["srun", *where, *_OPTIONS, *self.options, "sh", "-c", _ON_NODE, "sh", *agent_command(self.python)]

    def start(self, host: RunHost) -> subprocess.Popen[bytes]:
        """Starts the agent of a node. Its standard input and output are the connection to it, and closing the input
        ends it. Raises ApportionError where srun is not installed."""
        if shutil.which("srun") is None:
            raise ApportionError(
                "srun is not on PATH: load Slurm's module, or install it (apt-get install slurm-client)"
            )
        return _Srun(
            self.command(host, os.environ["SLURM_JOB_ID"]),
            env=environment_of_steps(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )

    def why_lost(self, host: str, status: int | None, said: Sequence[str], *, is_up: bool) -> str | None:
        """Returns why Slurm has ended a step or could not make it, with the cure; None where the agent itself has
        ended."""
        if status is not None and status < 0:
            return f"host {host}: its srun was ended by {signal.Signals(-status).name}; resume=True goes on"
        text = "\n".join(line for line in said if line.startswith(self.own_words))
        if not is_up:
            lines = [line for line in text.splitlines() if not _NO_REASON.search(line)]
            return f"host {host}: Slurm does not start its agent ({lines[-1]}); {_CURE}" if lines else None
        if (cancelled := _CANCELLED.search(text)) is not None:
            why = (cancelled[1] or "").strip().lower() or "by hand or by the system"
            return f"host {host}: Slurm has cancelled the step that held its agent, {why}; resume=True goes on"
        if _LOST.search(text):
            why = text.splitlines()[-1]
            return f"host {host}: Slurm has lost the step that held its agent ({why}); resume=True goes on"
        return None

    def release(self, hosts: Sequence[RunHost]) -> None:
        """Ends what is left of the steps: one whose srun was killed goes on without it."""
        job = os.environ.get("SLURM_JOB_ID", "")
        listing = ["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # they end with the job
            listed = subprocess.run(listing, capture_output=True, text=True, timeout=_END_SECONDS).stdout
            steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [_step_name()]]
            if steps:
                subprocess.run(["scancel", "--signal=HUP", *steps], capture_output=True, timeout=_END_SECONDS)


def _step_name() -> str:
    """Returns what the steps of this process's runs are called."""
    return f"apportion-{os.getpid()}"


@final
class _Srun(subprocess.Popen[bytes]):
    """An srun, which ends its step before it is killed itself: one that is killed leaves the step where it is."""

    def kill(self) -> None:
        self.terminate()
        try:
            self.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            super().kill()
