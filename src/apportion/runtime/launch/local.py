"""local: processes on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import cloudpickle

from apportion.core.launcher import Carried, Launcher
from apportion.process import most_threads, usable_cores
from apportion.runtime.spawn.client import ForkedProcess, NotForked, SpawnTask
from apportion.runtime.spawn.imports import Imports
from apportion.runtime.spawn.template import Spare, template


@dataclass(frozen=True, repr=False)
class Local(Launcher):
    """Worker processes on this machine, each with a number of threads."""

    workers: int | None = None
    """The number of processes that take batches; None: one a core, or one a GPU."""
    threads: int | None = None
    """The number of threads of each worker; None: the cores, divided among the workers, and OMP_NUM_THREADS at most,
    where that is set."""
    device: str | None = None
    """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int = 0
    """The number of data-loading processes of each worker; they count against the cores."""

    def __post_init__(self) -> None:
        self._must_be_whole("workers", "threads")
        self._must_be_whole("loaders", least=0)
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f'device={self.device!r} must be "cpu" or "cuda"')

    def with_workers(self, workers: int) -> Self:
        return replace(self, workers=workers)

    def dispatch(self, carried: Carried) -> Any:
        return carried.on_processes(self)

    def on_cpu(self) -> bool:
        """Tells whether the workers compute on the CPU."""
        import torch

        return self.device == "cpu" or not torch.cuda.device_count()

    def places(self) -> int:
        """Returns the number of workers where none is given: one a GPU, or one a core."""
        import torch  # the command line asks for help without it

        return (torch.cuda.device_count() if self.device != "cpu" else 0) or usable_cores()

    def threads_each(self, ranks: int) -> int:
        """Returns the number of threads of each of ``ranks`` ranks: no more than the cores in all, unless asked for."""
        if self.threads is not None:
            return self.threads
        share = max(1, usable_cores() // ranks - self.loaders)
        return min(share, most_threads() or share)

    def overload(self, ranks: int) -> str | None:
        """Returns a warning where there are more runnable threads than cores, else None."""
        cores, threads = usable_cores(), self.threads_each(ranks)
        wanted = ranks * (threads + self.loaders)
        if wanted <= cores:
            return None
        return (
            f"{ranks} workers x {threads + self.loaders} threads and loaders on {cores} cores: they take turns, and "
            f"the run gets slower; use workers<={max(1, cores // (threads + self.loaders))}"
        )

    def prepare(self) -> None:
        """Blocks until processes can be started at once. Raises ApportionError where they cannot."""
        template().wait_ready()

    def import_ahead(self, modules: Sequence[str]) -> None:
        """Has these modules imported once by what processes are forked from, and returns at once."""
        template().import_ahead(modules)

    def start(self, target: str, payload: bytes, ranks: int, port: int) -> list[Process]:
        """Starts one process for each rank, which calls ``target`` with its channel and the payload."""
        return self.start_from(None, target, payload, ranks, port)

    def start_from(self, spare: Spare | None, target: str, payload: bytes, ranks: int, port: int) -> list[Process]:
        """Does what ``start`` does, with processes that are forked from the spare where that can be, else from the
        template."""
        started = list[Process]()
        try:
            for rank in range(ranks):
                task = self._task(target, payload, (rank, ranks, port))
                started.append(self._forked(rank, task, spare))
        except BaseException:
            for process in started:
                process.kill()
                process.channel.close()
            raise
        return started

    def replace(self, payload: bytes, slot: int, slots: int, port: int, spare: Spare | None = None) -> Process:
        """Starts a process that takes the slot of one that was lost: forked from the spare where that can be, else from
        the template."""
        place = (slot, slots, port)
        if spare is not None and spare.ready:
            try:
                return self._spawned(slot, self._task(spare.target, b"", place), spare.spawn)
            except NotForked:  # it was lost too
                spare.close()
        return self._spawned(slot, self._task("apportion.runtime.worker.entry:train", payload, place), template().spawn)

    def spare(self, payload: bytes) -> Spare:
        """Starts the process that replacements are forked from; it takes a while until it is ready."""
        return Spare(self._task(Spare.program, payload, None))

    def importer(self, imports: Imports) -> Spare:
        """Starts a process that imports these packages once for those that are then forked from it."""
        task = self._task(Spare.importer, cloudpickle.dumps(imports), None)
        return Spare(replace(task, environment={**task.environment, **_threads(1)}))

    def _forked(self, slot: int, task: SpawnTask, spare: Spare | None) -> Process:
        if spare is not None and spare.ready:
            with suppress(NotForked):  # it was lost
                return self._spawned(slot, task, spare.spawn)
        return self._spawned(slot, task, template().spawn)

    def _spawned(
        self, slot: int, task: SpawnTask, spawn: Callable[[SpawnTask, socket.socket], ForkedProcess]
    ) -> Process:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return Process(slot, ours, spawn(task, theirs))
        except BaseException:
            ours.close()
            raise

    def _task(self, target: str, payload: bytes, place: tuple[int, int, int] | None) -> SpawnTask:
        environment = {} if place is None else _environment(*place, self.threads_each(place[1]))
        return SpawnTask(
            target=target,
            payload=payload,
            environment={**os.environ, **environment},
            path=sys.path,
            directory=os.getcwd(),
        )


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
        **_threads(threads),
    }


def _threads(number: int) -> Mapping[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


@dataclass
class Process:
    """A worker process on this machine."""

    slot: int
    channel: socket.socket
    _forked: ForkedProcess

    def when_ended(self, call: Callable[[], None]) -> None:
        """Sets a function that is called, from another thread, once the process has ended; it may have ended by now."""
        self._forked.when_ended = call

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        assert self._forked.pid is not None
        return self._forked.pid

    def returncode(self) -> int | None:
        """Returns the exit status: negative for a signal, None while the process runs."""
        return self._forked.returncode()

    def wait(self, seconds: float) -> int | None:
        """Waits until the process has ended or the time is up, and returns the exit status as ``returncode`` does."""
        return self._forked.wait(seconds)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to what it has started."""
        self._forked.kill()
