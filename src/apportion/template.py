"""The process that workers are forked from: it has torch imported and a first optimizer step behind it.

A cold Python with torch takes seconds; a fork of this one takes milliseconds. It is safe because the template is
single-threaded (one BLAS thread, one torch thread, no CUDA) and only ever waits, forks and reaps. It lives as long as
the driver: the driver's death closes its socket and, on Linux, kills it; its own death kills the workers.
"""

from __future__ import annotations

import importlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from apportion.comm.channel import Lines, memory_file
from apportion.errors import ApportionError
from apportion.lifetime import die_with_parent

START_SECONDS = 120.0
"""To import torch on a busy machine with a cold disk."""
SPAWN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker process is to do: call ``target`` (``module:function``) with its socket and the payload."""

    target: str
    payload: bytes
    environment: Mapping[str, str]
    """The whole of it: what the driver has set since the template started counts too."""
    path: Sequence[str]
    """sys.path, so that what the driver could import the worker can."""
    directory: str


# The driver's side


@dataclass(eq=False)
class Forked:
    """A worker process as the driver knows it."""

    number: int
    """The driver's own: a process id is known only later, and another process may have it afterwards."""
    _template: Template
    pid: int | None = None
    status: int | None = None
    refused: str | None = None

    def returncode(self) -> int | None:
        """Like Popen's: negative for a signal, None while it runs."""
        return -signal.SIGKILL if self.status is None and self._template.gone else self.status

    def wait(self, seconds: float) -> int | None:
        """The same, once it has ended or the time is up."""
        self._template.wait_for(lambda: self.status is not None, seconds)
        return self.returncode()

    def kill(self) -> None:
        """SIGKILL for it and what it has started, by its parent: no other process can have taken the number."""
        self._template.kill(self)


class Template:
    """A running template; start it early, it imports while the driver goes on."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._lines = Lines(ours)
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._workers: dict[int, Forked] = {}
        self._ready = self.gone = False
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        threading.Thread(target=self._live, args=(theirs,), name="template", daemon=True).start()

    def _live(self, theirs: socket.socket) -> None:
        """Start it and listen to it. One thread for both: on Linux the process dies with the thread that started it,
        and the caller's may end before the driver does."""
        try:
            with theirs:
                self._process = self._start(theirs.fileno())
            while (messages := self._lines.receive()) is not None:
                with self._condition:
                    for message in messages:
                        self._note(message)
                    self._condition.notify_all()
        except OSError as error:
            self._why = f" ({error})"
        with self._condition:
            self.gone = True
            self._condition.notify_all()

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-m", "apportion.template", str(descriptor), str(os.getpid())],
            pass_fds=[descriptor],
            env={**os.environ, **one_thread},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a worker prints does not mix with what a program may read from the driver
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )

    def _note(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            self._ready = True
        elif kind == "started":
            self._workers[message["worker"]].pid = message["pid"]
        elif kind == "refused":
            self._workers.pop(message["worker"]).refused = message["why"]
        elif kind == "exited":
            self._workers.pop(message["worker"]).status = message["status"]

    @property
    def alive(self) -> bool:
        """Can it still fork?"""
        return not self.gone and (self._process is None or self._process.poll() is None)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Block until it holds, or the template is gone, or the time is up; does it hold?"""
        with self._condition:
            self._condition.wait_for(lambda: condition() or self.gone, seconds)
            return condition()

    def wait_ready(self) -> None:
        """Block until it can fork at once. ApportionError where it cannot start."""
        if not self.wait_for(lambda: self._ready, START_SECONDS):
            raise self._died()

    def spawn(self, task: Task, channel: socket.socket) -> Forked:
        """Fork a worker that talks through the other end of ``channel``."""
        worker = Forked(next(self._numbers), self)
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
            answered = self.wait_for(lambda: worker.pid is not None or worker.refused is not None, START_SECONDS)
        except OSError as error:
            raise self._died() from error
        except BaseException:  # Ctrl-C: whoever it is by now, it goes
            worker.kill()
            raise
        finally:
            os.close(payload)
        if not answered:
            raise self._died()
        if worker.refused is not None:
            raise ApportionError(
                f"no worker could be started: {worker.refused}; use fewer workers, or end other processes"
            )
        return worker

    def _died(self) -> ApportionError:
        status = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(1.0)
        return ApportionError(
            f"the process that workers are forked from did not answer{self._why} (exit status {status}): if it said "
            "why, that is above; check that `python -c 'import torch'` works and that memory is left"
        )

    def kill(self, worker: Forked) -> None:
        """SIGKILL, where it lives."""
        try:
            self._lines.send({"kind": "kill", "worker": worker.number})
        except OSError:
            pass  # the template is gone, and its workers with it

    def close(self) -> None:
        """End it and every worker."""
        self._lines.close()
        self.wait_for(lambda: False, SPAWN_SECONDS)
        if self._process is None:
            return
        try:
            self._process.wait(SPAWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_template: Template | None = None
_template_lock = threading.Lock()


def template() -> Template:
    """This driver's template, started on first use and kept for the next run, like multiprocessing's forkserver."""
    global _template
    with _template_lock:
        if _template is not None and not _template.alive:
            _template.close()
            _template = None
        if _template is None:
            _template = Template()
        return _template


def close_template() -> None:
    """End the template now rather than with the driver."""
    global _template
    with _template_lock:
        if _template is not None:
            _template.close()
        _template = None


# The template's side


def _warm_up() -> None:
    """Everything that a worker imports and the first optimizer step sets up, done once for all."""
    import torch

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()  # the first optimizer imports torch._dynamo
    importlib.import_module("apportion.worker")


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self._lines = Lines(sock)
        self._children: dict[int, int] = {}
        """The driver's numbers, by process id."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = (wake_read, wake_write)
        self._selector.register(wake_read, selectors.EVENT_READ)

    def serve(self) -> None:
        self._tell({"kind": "ready"})
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake[0]:
                    self._wake[0].recv(4096)
                elif not self._take():
                    return
            self._reap()

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._lines.send(message)
        except OSError:
            pass  # the driver is gone: the next read says so

    def _take(self) -> bool:
        messages = self._lines.receive()
        if messages is None:
            for pid in self._children:
                _kill(pid)
            return False
        for message in messages:
            if message["kind"] == "spawn":
                self._spawn(message)
            else:
                for pid in [p for p, worker in self._children.items() if worker == message["worker"]]:
                    _kill(pid)
        return True

    def _spawn(self, message: dict[str, Any]) -> None:
        channel, payload = self._lines.take_fd(), self._lines.take_fd()
        parent, answer = os.getpid(), {"worker": message["worker"]}
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"kind": "refused", "why": str(error), **answer})
        else:
            if pid == 0:
                self._become(message, channel, payload, parent)
            self._children[pid] = message["worker"]
            self._tell({"kind": "started", "pid": pid, **answer})
        os.close(channel)
        os.close(payload)

    def _become(self, message: dict[str, Any], channel: int, payload: int, parent: int) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._lines.socket.close()
            self._selector.close()
            for end in self._wake:
                end.close()
            os.setsid()
            die_with_parent(parent)
            _set_environment(message["environment"])
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a killed worker has no time to flush
            sys.path[:] = message["path"]
            os.chdir(message["directory"])
            module, _, function = message["target"].partition(":")
            call = getattr(importlib.import_module(module), function)
            with open(payload, "rb") as file:
                file.seek(0)
                given = file.read()
            status = call(socket.socket(fileno=channel), given)
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the driver's terminal may be gone
                    stream.flush()
            os._exit(status)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _kill_group(pid)
                code = os.waitstatus_to_exitcode(status)
                self._tell({"kind": "exited", "worker": self._children.pop(pid), "status": code})


def _kill(pid: int) -> None:
    """A child that is not waited for yet, and all that it has started."""
    _kill_group(pid)
    os.kill(pid, signal.SIGKILL)  # it may not lead a group yet


def _kill_group(pid: int) -> None:
    """What a worker has started and left; its number is taken for as long as one of them lives."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def main() -> None:
    """``python -m apportion.template FD DRIVER_PID``."""
    descriptor, driver = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up()
    _Server(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main()
