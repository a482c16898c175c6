"""What a launcher of several hosts must do: name them, and start an agent on each, whose standard input and output are
the connection to it. Everything else of a run on several hosts is the same, whichever launcher has started it."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, ClassVar, Protocol, Self, final

from apportion.core.launcher import Carried, Launcher


@dataclass(frozen=True)
class RunHost:
    """A host of a run: what its launcher calls it, and how many ranks it has."""

    destination: str
    """The name of the host, as its launcher finds it and messages call it."""
    workers: int | None
    """The number of workers; None: one a core, or one a GPU, as is found out there."""
    python: str | None = field(default=None, kw_only=True)
    """The interpreter of this host; None: that of the launcher."""


class AgentProcess(Protocol):
    """The process on this machine that is the connection to an agent, as ``subprocess.Popen`` is one of ssh."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The file that the agent reads; closing it ends the agent."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """The file that the agent writes."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """The file of what the agent and the launcher's own program print."""

    def poll(self) -> int | None:
        """Returns the exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended, and returns the exit status. ``timeout``: the most seconds. Raises
        subprocess.TimeoutExpired after them."""

    def kill(self) -> None:
        """Ends it, and the agent with it."""


class ConnectionProcess(subprocess.Popen[bytes]):
    """A program that is the connection to an agent, in a session of its own."""

    @classmethod
    def begin(cls, command: Sequence[str]) -> ConnectionProcess:
        """Starts the program. Raises OSError where that cannot be done."""
        return cls(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )

    def kill(self) -> None:
        """Ends the program and what it has started: what is left of it would hold the connection open."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True, repr=False, kw_only=True)
class HostsLauncher(Launcher, ABC):
    """A launcher that starts an agent on each of several hosts."""

    workers: int | None = None
    """The number of workers of each host; None: one a core, or one a GPU."""
    threads: int | None = None
    """The number of threads of each worker; None: the cores of its host, divided among its workers."""
    python: str | Mapping[str, str] | None = None
    """The interpreter on each host; None: the path of this one where it is there too, else the login shell's."""
    device: str | None = None
    """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int = 0
    """The number of data-loading processes of each worker."""

    python_by_host: ClassVar[bool] = False
    """Whether ``python`` may be a path for each host, by its name."""
    insecure: ClassVar[bool] = False
    """False: the ranks prove to each other that they know the secret of the run."""
    own_words: ClassVar[tuple[str, ...]] = ()
    """The prefixes of the lines that the launcher's own program prints: only ``why_lost`` reads such lines."""

    def __post_init__(self) -> None:
        self._must_be_whole("workers", "threads")
        self._must_be_whole("loaders", least=0)
        by_host = self.python_by_host and isinstance(self.python, Mapping)
        if not by_host and not isinstance(self.python, str | None):
            where = ", or one for some of the hosts by their names" * self.python_by_host
            raise ValueError(f"python={self.python!r} must be the path of an interpreter as text{where}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f'device={self.device!r} must be "cpu" or "cuda"')

    @abstractmethod
    def parsed(self) -> list[RunHost]:
        """Returns the hosts; rank 0 runs on the first. What they need together is taken here, and ``release`` gives it
        back. Raises ValueError or ApportionError where they cannot be had."""

    @abstractmethod
    def start(self, host: RunHost) -> AgentProcess:
        """Starts the agent of a host. Raises ApportionError where that cannot be done."""

    @abstractmethod
    def why_lost(self, host: str, status: int | None, said: Sequence[str], *, is_up: bool) -> str | None:
        """Returns why the connection to an agent has ended, with the cure, where that was not the agent's own end; else
        None. ``status``: the exit status of the connection's process; ``said``: the last lines that it and the agent
        have printed; ``is_up``: the agent had begun to speak."""

    @final
    def with_workers(self, workers: int) -> Self:
        return replace(self, workers=workers)

    @final
    def dispatch(self, carried: Carried) -> Any:
        return carried.on_hosts(self)

    def release(self, hosts: Sequence[RunHost]) -> None:
        """Gives back what ``parsed`` has taken for these hosts, after the last agent has ended."""

    def threads_each(self, cores: int, ranks: int) -> int:
        """Returns the number of threads of each of ``ranks`` ranks on a host with ``cores`` cores."""
        return self.threads if self.threads is not None else max(1, cores // ranks - self.loaders)


def as_texts(name: str, given: Sequence[str]) -> tuple[str, ...]:
    """Returns what was given as a tuple. Raises ValueError for a single text, whose letters are not meant."""
    if isinstance(given, str):
        raise ValueError(f"{name}={given!r} must be a list of texts: ({given!r},)")
    return tuple(given)
