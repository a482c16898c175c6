"""Processes that workers are forked from, as the driver sees them: the requests that it sends, and the reports that it
receives."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from apportion.comm.channel import Lines, memory_file
from apportion.errors import ApportionError


@dataclass(frozen=True, kw_only=True)
class SpawnTask:
    """A task for a forked process: call ``target`` (``module:function``) with its socket and the payload."""

    target: str
    payload: bytes
    environment: Mapping[str, str]
    """The whole environment: what the driver has set since the process that forks started counts too."""
    path: Sequence[str]
    """The driver's sys.path, so that the worker can import what the driver could."""
    directory: str


@dataclass(eq=False)
class ForkedProcess:
    """A forked process as the driver knows it."""

    number: int
    """The driver's own number of the process: a process id is known only later, and another process may have it
    afterwards."""
    _reaper: ForkServerClient
    """The client of the process's parent, which learns when the process ends."""
    pid: int | None = None
    status: int | None = None
    refused: str | None = None
    when_ended: Callable[[], None] = lambda: None
    """A function that is called from another thread when the process has ended."""

    def returncode(self) -> int | None:
        """Returns the exit status as Popen does: negative for a signal, None while the process runs."""
        return -signal.SIGKILL if self.status is None and self._reaper.gone else self.status

    def wait(self, seconds: float) -> int | None:
        """Waits until the process has ended or the time is up, and returns the exit status as ``returncode`` does."""
        self._reaper.wait_for(lambda: self.status is not None, seconds)
        return self.returncode()

    def kill(self) -> None:
        """Sends SIGKILL to the process and what it has started, by its parent: no other process can have taken the
        number."""
        self._reaper.kill(self)


class NotForked(Exception):
    """The process that forks is gone, or does not answer."""


_numbers = itertools.count()


@final
class ForkServerClient:
    """The driver's end of a process that forks. ``reaper``: the client whose children the forked processes become,
    where this one gives them away."""

    def __init__(self, sock: socket.socket, reaper: ForkServerClient | None = None) -> None:
        self._lines = Lines(sock)
        self._reaper = reaper or self
        self._condition = threading.Condition()
        self._workers: dict[int, ForkedProcess] = {}
        self.ready = self.gone = False
        """The flags that the process can fork at once, and that it has ended."""

    def listen(self) -> None:
        """Receives the reports of the process until it is gone; runs in a thread of its own."""
        try:
            while (messages := self._lines.receive()) is not None:
                ended = []
                with self._condition:
                    for message in messages:
                        ended += self._record(message)
                    self._condition.notify_all()
                # Outside the lock: the callback may start another process, which takes it.
                for worker in ended:
                    worker.when_ended()
        finally:
            self.lose()

    def lose(self) -> None:
        """Notes that the process has ended, and what it has forked with it."""
        with self._condition:
            self.gone = True
            self._condition.notify_all()
            # The kernel kills the children with the process that forks, so that all of them have ended by now.
            workers = list(self._workers.values())
        for worker in workers:
            worker.when_ended()

    def _record(self, message: dict[str, Any]) -> list[ForkedProcess]:
        """Records a report, and returns the processes that have ended."""
        kind = message["kind"]
        if kind == "ready":
            self.ready = True
        elif kind == "started":
            self._workers[message["worker"]].pid = message["pid"]
        elif kind == "refused":
            self._workers.pop(message["worker"]).refused = message["why"]
        elif kind == "exited":
            worker = self._workers.pop(message["worker"])
            worker.status = message["status"]
            return [worker]
        return []

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Blocks until the condition holds, or the process is gone, or the time is up; returns whether it holds."""
        with self._condition:
            self._condition.wait_for(lambda: condition() or self.gone, seconds)
            return condition()

    def import_ahead(self, modules: Sequence[str]) -> None:
        """Has the process import these modules before it forks again. One that cannot be imported is left to the
        code that needs it, which raises why."""
        try:
            self._lines.send({"kind": "import", "modules": list(modules)})
        except OSError:
            pass  # it is gone: the next fork raises that

    def spawn(self, task: SpawnTask, channel: socket.socket, seconds: float) -> ForkedProcess:
        """Forks a process that talks through the other end of ``channel``. Raises NotForked where the process that
        forks is gone, or the time is up; ApportionError where the system refuses."""
        # Known before the request is sent: the report of the start may arrive before send() returns.
        worker = ForkedProcess(next(_numbers), self._reaper)
        self._workers[worker.number] = worker
        request = {
            "kind": "spawn",
            "worker": worker.number,
            "target": task.target,
            "environment": dict(task.environment),
            "path": list(task.path),
            "directory": task.directory,
        }
        # The payload goes as a descriptor: it may have gigabytes, and a line of the channel must stay short.
        payload = memory_file("payload")
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(task.payload)
            self._lines.send(request, channel.fileno(), payload)
            answered = self.wait_for(lambda: worker.pid is not None or worker.refused is not None, seconds)
        except OSError as error:
            raise NotForked from error
        except BaseException:  # Ctrl-C: the process may have been forked by now, and must not stay
            worker.kill()
            raise
        finally:
            os.close(payload)
        if not answered:
            raise NotForked
        if worker.refused is not None:
            raise ApportionError(
                f"no worker could be started: {worker.refused}; use fewer workers, or end other processes"
            )
        if self._reaper is not self:
            # The child was given away in the fork; only its new parent can reap it, and kill it without a race.
            self._reaper.adopt(self._workers.pop(worker.number))
        return worker

    def adopt(self, worker: ForkedProcess) -> None:
        """Takes over a process that another one has forked and given away."""
        with self._condition:
            self._workers[worker.number] = worker
        self._send({"kind": "adopt", "worker": worker.number, "pid": worker.pid})

    def kill(self, worker: ForkedProcess) -> None:
        """Sends SIGKILL to a forked process, by its parent."""
        self._send({"kind": "kill", "worker": worker.number})

    def _send(self, order: Mapping[str, Any]) -> None:
        try:
            self._lines.send(order)
        except OSError:
            pass  # it is gone, and its children with it

    def close(self) -> None:
        """Closes the connection, which ends the process that forks."""
        self._lines.close()
