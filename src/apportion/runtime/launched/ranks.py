"""The ranks that a verb has make its steps, wherever they run: processes that are started here for it (``LocalRanks``),
or ranks that are running already, on one host or several (``RunningRanks``)."""

from __future__ import annotations

import base64
import os
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

import torch

from apportion.comm.channel import Lines, Message
from apportion.core.strategy import Strategy
from apportion.errors import WorkerFailed
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import Spare
from apportion.runtime.supervisor.failures import Stop, WorkerEvent, WorkerRaised, failure, next_action
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job

STEPS = "apportion.runtime.worker.entry:steps"
"""The program of a process that makes steps at its driver's orders."""


class StepPool(Protocol):
    """Ranks that have built a step, and make steps when their driver says so."""

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order to every rank."""

    def ask(self, order: Mapping[str, Any], kind: str, seconds: float) -> list[Message]:
        """Sends an order to every rank and returns their answers, as ``answers`` does."""

    def answers(self, kind: str, seconds: float) -> list[Message]:
        """Returns one message of this kind from every rank, by rank. Raises what a rank fails with, and WorkerFailed
        where one does not answer within ``seconds``."""

    def close(self) -> None:
        """Ends the steps, and the processes where they were started for them."""


class Ranks(ABC):
    """The ranks of a verb, as its driver sees them. The driver runs on rank 0's host."""

    hosts: int = 1
    """The number of hosts that the ranks run on."""
    side_by_side: bool = True
    """Whether several strategies can be built at the same time, and make steps in turns."""
    one_folder: bool = True
    """Whether every rank sees the files of the driver's host."""

    @abstractmethod
    def layout(self, strategy: Strategy) -> Local:
        """Returns how many workers a strategy has on these ranks, as a launcher of local processes. Raises ValueError
        where it does not run on them."""

    @abstractmethod
    def layout_alone(self) -> Local:
        """Returns the layout of a strategy of one process, which runs on the driver's host."""

    @abstractmethod
    def begin(
        self,
        job: Job,
        launcher: Local,
        ranks: int,
        *,
        cuts: Sequence[str] = (),
        which: int = 0,
        importer: Spare | None = None,
    ) -> StepPool:
        """Has ``ranks`` ranks build the step of a job, laid out as ``launcher`` says.

        ``cuts``: the layers before which the strategy cuts the network into stages. ``which``: the number of the job
        among those that the ranks have. ``importer``: the process that new ones are forked from.
        """

    @abstractmethod
    def ranks_here(self, ranks: int) -> int:
        """Returns how many of the ``ranks`` ranks of a strategy run on the driver's host."""

    @abstractmethod
    def start(self, target: str, job: Job, launcher: Local, importer: Spare | None = None) -> StepPool:
        """Starts one process on the driver's host, which calls ``target`` (``module:function``) with a job, and ends
        with the ranks. ``importer``: the process that it is forked from."""


@final
class LocalRanks(Ranks):
    """Processes on this machine, which are started for each strategy."""

    def __init__(self, launcher: Local | None = None) -> None:
        self._launcher = launcher or Local()

    def layout(self, strategy: Strategy) -> Local:
        return self._launcher

    def layout_alone(self) -> Local:
        return replace(self._launcher, workers=1)

    def begin(
        self,
        job: Job,
        launcher: Local,
        ranks: int,
        *,
        cuts: Sequence[str] = (),
        which: int = 0,
        importer: Spare | None = None,
    ) -> WorkerPool:
        return WorkerPool(launcher, STEPS, job, ranks, importer)

    def ranks_here(self, ranks: int) -> int:
        return ranks

    def start(self, target: str, job: Job, launcher: Local, importer: Spare | None = None) -> WorkerPool:
        return WorkerPool(launcher, target, job, 1, importer)


# Rank 0's side of ranks that are running already: orders to all of them, and their answers, as a ``WorkerPool`` has
# them of processes of its own.


LOOK_SECONDS = 0.5
"""The seconds between two looks at what is due."""
END_SECONDS = 600.0
"""The seconds that ranks may take to end what they do: what one computes is not cut off."""
LEAVE_SECONDS = 10.0
"""The seconds that ranks may take to hear what it all came to."""
FIELDS = ("changes", "workers", "proof", "rows", "rare", "short", "cut", "gradients", "plain")
"""The fields of a job that rank 0 decides for all ranks."""


@final
class RunningRanks(Ranks):
    """The ranks, as their driver sees them. ``abort`` may be called from any thread, everything else from the driver's
    alone."""

    side_by_side = False  # each rank holds the step of one strategy

    def __init__(self, links: Sequence[socket.socket], names: Sequence[str], *, here: int, hosts: int = 1) -> None:
        """Takes a connection to each rank, by rank, and what each is called in messages of errors. ``here``: the number
        of ranks on this host, of ``hosts``."""
        self._here, self.hosts, self.one_folder = here, hosts, hosts == 1
        self._names = list(names)
        self._lines = [Lines(link) for link in links]
        self._selector = selectors.DefaultSelector()
        for rank, link in enumerate(links):
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._happened: list[WorkerEvent] = []
        self._last = time.monotonic()
        self._path: str | None = None
        """The path of the last order, at which rank 0 leaves what it writes, and what others have written is left."""
        self._begun = self._owed = self._aborted = False
        self._beside: list[WorkerPool] = []
        """The processes on this host that end with the ranks."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._lines)

    def layout(self, strategy: Strategy) -> Local:
        return local_layout(strategy, self.size)

    def layout_alone(self) -> Local:
        return Local(workers=1, device="cpu")

    def begin(
        self,
        job: Job,
        launcher: Local,
        ranks: int,
        *,
        cuts: Sequence[str] = (),
        which: int = 0,
        importer: Spare | None = None,
    ) -> StepPool:
        """Has every rank build its step: its own workload and strategy, with what rank 0 decides. A strategy of one
        process gets one of its own on this host. ``close`` ends what was begun."""
        if ranks < self.size:
            return self.start(STEPS, job, launcher, importer)
        self._happened.clear()
        self._begun = True
        fields = {name: getattr(job, name) for name in FIELDS}
        self.send({"kind": "begin", "job": fields, "cuts": list(cuts), "which": which})
        return self

    def ranks_here(self, ranks: int) -> int:
        return self._here

    def start(self, target: str, job: Job, launcher: Local, importer: Spare | None = None) -> StepPool:
        """Starts a process on this host, which ``abort`` ends as well."""
        pool = WorkerPool(launcher, target, job, 1, importer)
        self._beside = [*self._beside, pool]
        if self._aborted:
            _kill(pool)
        return _PoolBeside(pool, self._forget)

    def _forget(self, pool: WorkerPool) -> None:
        self._beside = [other for other in self._beside if other is not pool]

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order to every rank."""
        self._owed = True
        self._path = order.get("path", self._path)
        for lines in self._lines:
            with suppress(OSError):  # it is gone, which is heard
                lines.send(order)

    def ask(self, order: Mapping[str, Any], kind: str, seconds: float) -> list[Message]:
        """Sends an order to all ranks and returns their answers of this kind, by rank. Raises as ``answers`` does."""
        self.send(order)
        return self.answers(kind, seconds)

    def answers(self, kind: str, seconds: float) -> list[Message]:
        """Returns one message of this kind from every rank, by rank. Raises what a rank fails with, and WorkerFailed
        where one does not answer within ``seconds``."""
        given: dict[int, Message] = {}
        end = time.monotonic() + seconds
        while len(given) < self.size:
            left = end - time.monotonic()
            for rank, message in self._hear(min(LOOK_SECONDS, max(0.0, left))):
                if message["kind"] == kind:
                    given[rank] = self._with_files(message)
            if self._aborted:
                raise WorkerFailed(f"{self._names[0]} has given up")
            action = next_action(self._happened, self.size, time.monotonic() - self._last)
            if isinstance(action, Stop):
                raise failure(action)
            if left < 0 and len(given) < self.size:
                late = ", ".join(self._names[rank] for rank in range(self.size) if rank not in given)
                raise WorkerFailed(f"{late} did not answer within {seconds:.0f} s")
        self._owed = False
        return [given[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends what was begun on every rank, and waits until it has: what one of them computes goes on to its end, what
        one waits for does not. Raises WorkerFailed where a rank does not come to an end."""
        if not self._begun or self._aborted:
            return
        self._begun = False
        self.send({"kind": "end" if self._owed or self._happened else "close"})
        ended: set[int] = set()
        end = time.monotonic() + END_SECONDS
        while len(ended) < len(self._selector.get_map()):
            if time.monotonic() > end:
                late = ", ".join(name for rank, name in enumerate(self._names) if rank not in ended)
                raise WorkerFailed(f"{late} did not end their steps within {END_SECONDS:.0f} s")
            for rank, message in self._hear(LOOK_SECONDS):
                if message["kind"] == "ended":
                    ended.add(rank)
            ended &= {key.data for key in self._selector.get_map().values()}

    def finish(self, message: Message) -> None:
        """Tells every rank what it all came to, and lets go of them once they have heard it."""
        if not self._aborted:
            self.send(message)
        end = time.monotonic() + LEAVE_SECONDS
        while self._selector.get_map() and time.monotonic() < end:
            for _ in self._hear(LOOK_SECONDS):
                pass
        self._selector.close()
        for lines in self._lines:
            lines.close()

    def abort(self, message: Message) -> None:
        """Tells the other ranks what it all came to, and has the driver end with an error: the processes beside the
        ranks are gone for it."""
        self._aborted = True
        for lines in self._lines[1:]:
            with suppress(OSError):
                lines.send(message)
        for pool in self._beside:
            _kill(pool)

    def _hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields what ranks say within this time, and returns at the first words. What happens to them is noted."""
        for key, _ in self._selector.select(seconds):
            rank, lines = key.data, self._lines[key.data]
            messages = lines.receive()
            if messages is None:
                self._selector.unregister(key.fileobj)
                self._note(WorkerRaised(rank, f"{self._names[rank]} is gone: its connection has ended", None))
                continue
            for message in messages:
                if message["kind"] == "raised":
                    self._note(WorkerRaised(rank, **{k: v for k, v in message.items() if k != "kind"}))
                else:
                    yield rank, message

    def _note(self, event: WorkerEvent) -> None:
        self._happened.append(event)
        self._last = time.monotonic()

    def _with_files(self, message: Message) -> Message:
        """Writes the files that came with an answer to where rank 0 looks for them."""
        for suffix, data in message.pop("files", {}).items():
            assert self._path is not None
            Path(f"{self._path}{suffix}").write_bytes(base64.b64decode(data))
        return message


@final
class _PoolBeside:
    """A process beside the ranks. ``forget``: called before the process is ended, whose id may then be another's."""

    def __init__(self, pool: WorkerPool, forget: Callable[[WorkerPool], None]) -> None:
        self._pool, self._forget = pool, forget

    def send(self, order: Mapping[str, Any]) -> None:
        self._pool.send(order)

    def ask(self, order: Mapping[str, Any], kind: str, seconds: float) -> list[Message]:
        return self._pool.ask(order, kind, seconds)

    def answers(self, kind: str, seconds: float) -> list[Message]:
        return self._pool.answers(kind, seconds)

    def close(self) -> None:
        self._forget(self._pool)
        self._pool.close()


def _kill(pool: WorkerPool) -> None:
    for pid in pool.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def local_layout(strategy: Strategy, ranks: int) -> Local:
    """Returns the layout of a strategy on exactly ``ranks`` ranks, as if they were local processes. Raises
    ValueError where it does not run on that many."""
    workers = next((n for n in range(1, ranks + 1) if strategy.ranks(n) == ranks), None)
    if workers is None or (strategy.one_process and ranks > 1):
        why = "runs in one process" if strategy.one_process else f"needs at least {strategy.ranks(1)}"
        raise ValueError(f"{strategy} {why}, and {ranks} ranks are running: start as many, or use data_parallel")
    return Local(workers=workers, threads=torch.get_num_threads(), device="cpu")
