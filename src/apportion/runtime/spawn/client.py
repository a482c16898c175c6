"""Processes that workers are forked from, as the driver sees them: what they are told, and what they tell."""

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
    """What a process is to do: call ``target`` (``module:function``) with its socket and the payload."""

    target: str
    payload: bytes
    environment: Mapping[str, str]
    """The whole of it: what the driver has set since the process that forks started counts too."""
    path: Sequence[str]
    """sys.path, so that what the driver could import the worker can."""
    directory: str


@dataclass(eq=False)
class ForkedProcess:
    """A forked process as the driver knows it."""

    number: int
    """The driver's own: a process id is known only later, and another process may have it afterwards."""
    _reaper: ForkServerClient
    """Its parent, which is told when it ends."""
    pid: int | None = None
    status: int | None = None
    refused: str | None = None
    when_ended: Callable[[], None] = lambda: None
    """Called from another thread."""

    def returncode(self) -> int | None:
        """Like Popen's: negative for a signal, None while it runs."""
        return -signal.SIGKILL if self.status is None and self._reaper.gone else self.status

    def wait(self, seconds: float) -> int | None:
        """The same, once it has ended or the time is up."""
        self._reaper.wait_for(lambda: self.status is not None, seconds)
        return self.returncode()

    def kill(self) -> None:
        """SIGKILL for it and what it has started, by its parent: no other process can have taken the number."""
        self._reaper.kill(self)


class NotForked(Exception):
    """The process that forks is gone, or does not answer."""


_numbers = itertools.count()


@final
class ForkServerClient:
    """The driver's end of a process that forks. ``reaper``: whose children they become, where it gives them away."""

    def __init__(self, sock: socket.socket, reaper: ForkServerClient | None = None) -> None:
        self._lines = Lines(sock)
        self._reaper = reaper or self
        self._condition = threading.Condition()
        self._workers: dict[int, ForkedProcess] = {}
        self.ready = self.gone = False
        """Can it fork at once? Has it ended?"""

    def listen(self) -> None:
        """Hear what it tells, until it is gone; in a thread of its own."""
        try:
            while (messages := self._lines.receive()) is not None:
                ended = []
                with self._condition:
                    for message in messages:
                        ended += self._note(message)
                    self._condition.notify_all()
                for worker in ended:
                    worker.when_ended()
        finally:
            self.lose()

    def lose(self) -> None:
        """It has ended, and what it has forked with it."""
        with self._condition:
            self.gone = True
            self._condition.notify_all()
            workers = list(self._workers.values())
        for worker in workers:
            worker.when_ended()

    def _note(self, message: dict[str, Any]) -> list[ForkedProcess]:
        """Returns who has ended."""
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
        """Block until it holds, or the process is gone, or the time is up; does it hold?"""
        with self._condition:
            self._condition.wait_for(lambda: condition() or self.gone, seconds)
            return condition()

    def spawn(self, task: SpawnTask, channel: socket.socket, seconds: float) -> ForkedProcess:
        """Fork a process that talks through the other end of ``channel``. NotForked where it is gone, or the time is
        up; ApportionError where the system refuses."""
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
        payload = memory_file("payload")
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(task.payload)
            self._lines.send(request, channel.fileno(), payload)
            answered = self.wait_for(lambda: worker.pid is not None or worker.refused is not None, seconds)
        except OSError as error:
            raise NotForked from error
        except BaseException:  # Ctrl-C: whoever it is by now, it goes
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
            self._reaper.adopt(self._workers.pop(worker.number))
        return worker

    def adopt(self, worker: ForkedProcess) -> None:
        """A process that another one has forked and given away."""
        with self._condition:
            self._workers[worker.number] = worker
        self._tell({"kind": "adopt", "worker": worker.number, "pid": worker.pid})

    def kill(self, worker: ForkedProcess) -> None:
        """SIGKILL, where it lives."""
        self._tell({"kind": "kill", "worker": worker.number})

    def _tell(self, order: Mapping[str, Any]) -> None:
        try:
            self._lines.send(order)
        except OSError:
            pass  # it is gone, and its children with it

    def close(self) -> None:
        """It ends."""
        self._lines.close()
