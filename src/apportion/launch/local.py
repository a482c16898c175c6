"""local: processes on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from apportion.cores import usable_cores
from apportion.template import Forked, Task, template
from apportion.values import Value


@final
@dataclass(frozen=True, repr=False)
class Local(Value):
    """So many processes on this machine, each with so many threads."""

    workers: int | None = None
    """Processes that take batches; None: one a core, or one a GPU."""
    threads: int | None = None
    """Each worker's; None: the cores, divided."""
    device: str | None = None
    """"cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int = 0
    """Data-loading processes a worker; they count against the cores."""

    launched = False
    """Are the ranks running already? No: they have to be started."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("threads", 1), ("loaders", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f'device={self.device!r} must be "cpu" or "cuda"')

    def places(self) -> int:
        """Workers where no number is given: one a GPU, or one a core."""
        import torch  # the command line asks for help without it

        return (torch.cuda.device_count() if self.device != "cpu" else 0) or usable_cores()

    def threads_each(self, ranks: int) -> int:
        """Threads of each of so many ranks: never more runnable ones than cores, unless asked for."""
        if self.threads is not None:
            return self.threads
        return max(1, usable_cores() // ranks - self.loaders)

    def overload(self, ranks: int) -> str | None:
        """A warning where there are more runnable threads than cores."""
        cores, threads = usable_cores(), self.threads_each(ranks)
        wanted = ranks * (threads + self.loaders)
        if wanted <= cores:
            return None
        return (
            f"{ranks} workers x {threads + self.loaders} threads and loaders on {cores} cores: they take turns, and "
            f"the run gets slower; use workers<={max(1, cores // (threads + self.loaders))}"
        )

    def prepare(self) -> None:
        """Block until processes can be started at once. ApportionError where they cannot."""
        template().wait_ready()

    def start(self, target: str, payload: bytes, ranks: int, port: int) -> list[Process]:
        """One process a rank, which calls ``target`` with its channel and the payload."""
        parent, started = template(), list[Process]()
        try:
            for rank in range(ranks):
                ours, theirs = socket.socketpair()
                with theirs:
                    task = Task(
                        target=target,
                        payload=payload,
                        environment={**os.environ, **_environment(rank, ranks, port, self.threads_each(ranks))},
                        path=sys.path,
                        directory=os.getcwd(),
                    )
                    started.append(Process(rank, ours, parent.spawn(task, theirs)))
        except BaseException:
            for process in started:
                process.kill()
                process.channel.close()
            raise
        return started


def _environment(rank: int, ranks: int, port: int, threads: int) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the driver holds the store: no rank has to outlive the others
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


@dataclass
class Process:
    """A worker process on this machine."""

    rank: int
    channel: socket.socket
    _forked: Forked

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._forked.pid is not None
        return self._forked.pid

    def returncode(self) -> int | None:
        """Negative for a signal, None while it runs."""
        return self._forked.returncode()

    def wait(self, seconds: float) -> int | None:
        """The same, once it has ended or the time is up."""
        return self._forked.wait(seconds)

    def kill(self) -> None:
        """SIGKILL, for it and for what it has started."""
        self._forked.kill()
