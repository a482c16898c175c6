"""The process that workers are forked from: it has torch imported and a first optimizer step behind it.

A cold Python with torch takes seconds; a fork of this one takes milliseconds. It is safe because the template is
single-threaded (one BLAS thread, one torch thread, no CUDA) and only ever waits, forks and reaps. It lives as long as
the driver: the driver's death closes its socket and, on Linux, kills it; its own death kills the workers.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.comm.channel import Lines
from apportion.errors import ApportionError

_PR_SET_PDEATHSIG = 1
START_SECONDS = 120.0
"""To import torch on a busy machine with a cold disk."""
SPAWN_SECONDS = 10.0


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent ends (Linux; elsewhere the closed socket tells it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker process is to do: call ``target`` (``module:function``) with its socket and the payload."""

    target: str
    payload: bytes
    environment: Mapping[str, str]
    path: Sequence[str]
    """sys.path, so that what the driver could import the worker can."""
    directory: str


# The driver's side


class Template:
    """A running template; start it early, it imports while the driver goes on."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "apportion.template", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a worker prints does not mix with what a program may read from the driver
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )
        theirs.close()
        self._lines = Lines(ours)
        self._condition = threading.Condition()
        self._exits: dict[int, int] = {}
        self._started: list[int] = []
        self._gone = False
        threading.Thread(target=self._listen, name="template", daemon=True).start()

    def _listen(self) -> None:
        while (messages := self._lines.receive()) is not None:
            with self._condition:
                for message in messages:
                    if message["kind"] == "started":
                        self._started.append(message["pid"])
                    else:
                        self._exits[message["pid"]] = message["status"]
                self._condition.notify_all()
        with self._condition:
            self._gone = True
            self._condition.notify_all()

    @property
    def alive(self) -> bool:
        """Can it still fork?"""
        return not self._gone and self._process.poll() is None

    def spawn(self, task: Task, channel: socket.socket) -> int:
        """Fork a worker that talks through the other end of ``channel``; its process id."""
        request = {
            "kind": "spawn",
            "target": task.target,
            "payload": base64.b64encode(task.payload).decode(),
            "environment": dict(task.environment),
            "path": list(task.path),
            "directory": task.directory,
        }
        with self._condition:
            try:
                self._lines.send(request, channel.fileno())
            except OSError as error:
                raise self._died() from error
            if not self._condition.wait_for(lambda: self._started or self._gone, START_SECONDS) or not self._started:
                raise self._died()
            return self._started.pop(0)

    def _died(self) -> ApportionError:
        return ApportionError(
            f"the process that workers are forked from did not answer (exit status {self._process.poll()}): "
            "its message is above; check that `python -c 'import torch'` works and that memory is left"
        )

    def returncode(self, pid: int) -> int | None:
        """Like Popen's: negative for a signal, None while it runs."""
        with self._condition:
            if pid not in self._exits and self._gone:
                return -signal.SIGKILL
            return self._exits.get(pid)

    def wait(self, pid: int, seconds: float) -> int | None:
        """The same, once it has ended or the time is up."""
        with self._condition:
            self._condition.wait_for(lambda: pid in self._exits or self._gone, seconds)
        return self.returncode(pid)

    def kill(self, pid: int) -> None:
        """SIGKILL, by its parent: no other process can have taken the number."""
        try:
            self._lines.send({"kind": "kill", "pid": pid})
        except OSError:
            pass  # the template is gone, and its workers with it

    def close(self) -> None:
        """End it and every worker."""
        self._lines.close()
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
        if _template is None or not _template.alive:
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
        self._children: set[int] = set()
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
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake[0]:
                    self._wake[0].recv(4096)
                elif not self._take():
                    return
            self._reap()

    def _take(self) -> bool:
        messages = self._lines.receive()
        if messages is None:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
            return False
        for message in messages:
            if message["kind"] == "spawn":
                self._spawn(message)
            elif message["pid"] in self._children:
                os.kill(message["pid"], signal.SIGKILL)
        return True

    def _spawn(self, message: dict[str, Any]) -> None:
        channel = self._lines.take_fd()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(message, channel, parent)
        os.close(channel)
        self._children.add(pid)
        self._lines.send({"kind": "started", "pid": pid})

    def _become(self, message: dict[str, Any], channel: int, parent: int) -> None:
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
            os.environ.update(message["environment"])
            sys.path[:] = message["path"]
            os.chdir(message["directory"])
            module, _, function = message["target"].partition(":")
            call = getattr(importlib.import_module(module), function)
            status = call(socket.socket(fileno=channel), base64.b64decode(message["payload"]))
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                self._lines.send({"kind": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def main() -> None:
    """``python -m apportion.template FD DRIVER_PID``."""
    descriptor, driver = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up()
    _Server(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main()
