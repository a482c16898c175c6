"""The ranks of one host, as its agent starts, hears and ends them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, final

from apportion.comm.channel import Lines
from apportion.runtime.spawn.client import ForkedProcess, SpawnTask
from apportion.runtime.spawn.template import template

PROGRAM = "apportion.api.host_rank:main"
"""The function that a rank calls."""
END_SECONDS = 3.0
"""The seconds that ranks which were killed may take to be gone."""
_OUTPUT_SECONDS = 0.5
"""The seconds that a rank's output may come later than its end: what it has started may hold it open."""
_CHUNK = 1 << 16
Tell = Callable[[Mapping[str, Any]], None]
"""A function that sends a message to the driver; it may be called from any thread."""


@dataclass(frozen=True, kw_only=True)
class RanksStart:
    """What the ranks of a host are started with."""

    first: int
    """The first rank of this host."""
    count: int
    size: int
    """The number of ranks of all hosts."""
    address: str
    """The address of rank 0's host."""
    port: int
    threads: int
    run: str
    """A name of the run, which other runs do not have."""
    secret_file: str
    environment: Mapping[str, str]
    """What the driver's environment says that each rank has to know."""
    path: list[str]
    """The folders in which the ranks find modules."""
    directory: str

    def environment_of(self, local_rank: int, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of a rank, as under torchrun. ``own``: the agent's."""
        place = {
            "RANK": self.first + local_rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.count,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "OMP_NUM_THREADS": self.threads,
            "MKL_NUM_THREADS": self.threads,
            "TORCHELASTIC_RUN_ID": self.run,
            "APPORTION_SECRET_FILE": self.secret_file,
        }
        kept = {name: value for name, value in own.items() if name != "PYTHONSAFEPATH"}
        return {**kept, **self.environment, **{name: str(value) for name, value in place.items()}}


class _Rank:
    """A rank's process, with the agent's ends of its channel and of its output."""

    def __init__(self, number: int, process: ForkedProcess, channel: socket.socket, output: int) -> None:
        self.number, self.process, self.lines = number, process, Lines(channel)
        self.output: BinaryIO = open(output, "rb", buffering=0)  # noqa: SIM115 (read until the rank has ended)
        self.threads: list[threading.Thread] = []


@final
class HostRanks:
    """The ranks of this host, forked from a process that has torch imported."""

    def __init__(self, start: RanksStart, payload: bytes, tell: Tell) -> None:
        """Starts the ranks. Raises ApportionError where that cannot be done; ``close`` ends those that were started."""
        self._start, self._tell = start, tell
        self._ranks: list[_Rank] = []
        self.all_ended = threading.Event()
        """An event that is set once every rank has ended."""
        self._left = start.count
        self._lock = threading.Lock()
        for local_rank in range(start.count):
            self._ranks.append(self._started(local_rank, payload))
        for rank in self._ranks:
            rank.threads = [
                threading.Thread(target=self._pass_output, args=(rank,), daemon=True),
                threading.Thread(target=self._listen, args=(rank,), daemon=True),
            ]
            for thread in rank.threads:
                thread.start()

    def _started(self, local_rank: int, payload: bytes) -> _Rank:
        task = SpawnTask(
            target=PROGRAM,
            payload=payload,
            environment=self._start.environment_of(local_rank, os.environ),
            path=self._start.path,
            directory=self._start.directory,
        )
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            socket.send_fds(ours, [b"o"], [write])  # the first that a rank does is to write there what it prints
            process = template().spawn(task, theirs)
        except BaseException:
            ours.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        return _Rank(self._start.first + local_rank, process, ours, read)

    def order(self, message: Mapping[str, Any]) -> None:
        """Passes an order of the driver on to the first rank of this host."""
        try:
            self._ranks[0].lines.send(message)
        except OSError:
            pass  # it has ended, and the driver is told so

    def _pass_output(self, rank: _Rank) -> None:
        """Tells the driver what a rank prints, line by line."""
        rest = b""
        while data := rank.output.read(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _CHUNK:
                lines, rest = [*lines, rest], b""
            if lines:
                self._tell_output(rank, lines)
        if rest:
            self._tell_output(rank, [rest])

    def _tell_output(self, rank: _Rank, lines: list[bytes]) -> None:
        text = [line.decode(errors="replace") for line in lines]
        self._tell({"kind": "output", "rank": rank.number, "lines": text})

    def _listen(self, rank: _Rank) -> None:
        """Tells the driver what a rank tells, until it has ended, and how."""
        from apportion.runtime.supervisor.watchdog import memory_kills  # numpy, by now in the ranks' shadow

        kills = memory_kills()
        try:
            while (messages := rank.lines.receive()) is not None:
                for message in messages:
                    self._tell({**message, "rank": rank.number})
        except json.JSONDecodeError:  # cut short
            pass
        status = rank.process.wait(END_SECONDS)
        if status is None:  # it has closed its channel, and lives on
            rank.process.kill()
            status = rank.process.wait(END_SECONDS)
        rank.threads[0].join(_OUTPUT_SECONDS)
        out_of_memory = memory_kills() > kills
        with self._lock:
            self._left -= 1
            if not self._left:
                self.all_ended.set()
        self._tell({"kind": "exited", "rank": rank.number, "status": status, "out_of_memory": out_of_memory})

    def close(self) -> None:
        """Kills the ranks and what they have started, and waits until they are gone."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait(END_SECONDS)
