"""A process that only waits, forks and reaps: the template, and the spare that was forked from it.

It is single-threaded, so a fork of it is safe: no other thread can hold a lock that the child would wait for.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

from apportion.comm.channel import Lines
from apportion.process import die_with_parent, in_slurm_job, outlive_notice
from apportion.runtime.spawn.imports import import_modules, note_beginning
from apportion.runtime.spawn.stacks import print_stacks_on_signal

_STRANGERS = 1000
"""The number of ended processes that are remembered though nothing has asked about them."""


def freeze() -> None:
    """Takes what has been imported out of the garbage collector's sight: in a forked process a collection would write
    to every object of it, so that the process gets a copy of each page that it shares with this one, which takes longer
    than to build most networks."""
    gc.collect()
    # Frozen objects are skipped by later collections, which would write into the header of each.
    gc.freeze()


@final
class ForkServer:
    """Forks processes on request. ``gives_to``: the process id of an ancestor that its children are given to: they
    outlive this process, and die with that one. ``sets``: environment variables that its children
    have besides those of their task: the packages that this process has imported have set them."""

    def __init__(
        self, sock: socket.socket, *, gives_to: int | None = None, sets: Mapping[str, str] | None = None
    ) -> None:
        self._lines, self._gives_to, self._sets = Lines(sock), gives_to, sets or {}
        self._children: dict[int, int] = {}
        """The driver's numbers of the child processes, by process id."""
        self._strangers: dict[int, int] = {}
        """The exit codes of processes that became this one's children when their parent ended: orphans, and the spare's
        children before they are adopted."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        # SIGCHLD may arrive between a reap and the next select(): the byte in the socket makes that select() return.
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = (wake_read, wake_write)
        self._selector.register(wake_read, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serves requests until the driver is gone."""
        self._send({"kind": "ready"})
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake[0]:
                    # One byte for each signal; how many there were does not matter, since _reap takes all that have
                    # ended.
                    self._wake[0].recv(4096)
                elif not self._serve_requests():
                    return
            self._reap()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._lines.send(message)
        except OSError:
            pass  # the driver is gone: the next read says so

    def _serve_requests(self) -> bool:
        messages = self._lines.receive()
        if messages is None:
            for pid in self._children:
                _kill(pid)
            return False
        for message in messages:
            if message["kind"] == "spawn":
                self._spawn(message)
            elif message["kind"] == "import":
                if import_modules(message["modules"]):
                    freeze()
            elif message["kind"] == "adopt":
                self._adopt(message["pid"], message["worker"])
            else:
                for pid in [p for p, worker in self._children.items() if worker == message["worker"]]:
                    _kill(pid)
        return True

    def _spawn(self, message: dict[str, Any]) -> None:
        # The descriptors are taken in the order in which they were sent, also where the fork fails: the next request
        # has its own.
        channel, payload = self._lines.take_fd(), self._lines.take_fd()
        answer = {"worker": message["worker"]}
        parent = os.getpid() if self._gives_to is None else self._gives_to
        try:
            pid = os.fork() if self._gives_to is None else _fork_away()
        except OSError as error:
            self._send({"kind": "refused", "why": str(error), **answer})
        else:
            if pid == 0:
                self._become(message, channel, payload, parent)
            if self._gives_to is None:
                self._children[pid] = message["worker"]
            self._send({"kind": "started", "pid": pid, **answer})
        os.close(channel)
        os.close(payload)

    def _become(self, message: dict[str, Any], channel: int, payload: int, parent: int) -> None:
        status = 1
        try:
            # The child shares the sockets of the server until they are closed: a signal to it would wake the server.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._lines.socket.close()
            self._selector.close()
            for end in self._wake:
                end.close()
            if in_slurm_job(os.environ):
                outlive_notice()
            # The worker leads a group of its own, by which it is killed with all that it has started; Ctrl-C at the
            # terminal does not reach it.
            os.setsid()
            print_stacks_on_signal()
            # After setsid, and with a look at the parent: it may have died since the fork, before the kernel was asked.
            die_with_parent(parent)
            _set_environment({**self._sets, **message["environment"]})
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a killed worker has no time to flush
            sys.path[:] = message["path"]
            os.chdir(message["directory"])
            note_beginning()
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

    def _adopt(self, pid: int, worker: int) -> None:
        try:
            # WNOWAIT leaves the status for _reap: this line only asks whether the process is a child of this one.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has ended, and was waited for, before its adoption was announced
            self._ended(pid, worker, self._strangers.pop(pid, -signal.SIGKILL))
        else:
            self._children[pid] = worker

    def _reap(self) -> None:
        while True:
            try:
                # Signals of the same kind are merged, so that one of them may stand for several ends.
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._children:
                self._ended(pid, self._children.pop(pid), code)
            else:
                self._strangers[pid] = code
                if len(self._strangers) > _STRANGERS:
                    del self._strangers[next(iter(self._strangers))]

    def _ended(self, pid: int, worker: int, code: int) -> None:
        _kill_group(pid)
        self._send({"kind": "exited", "worker": worker, "status": code})


def _fork_away() -> int:
    """Forks a process that is not a child of this one: the process in between has ended, and been waited for, before
    the new process goes on, so its parent is the nearest ancestor that takes orphans in."""
    pid_read, pid_write = os.pipe()
    exit_read, exit_write = os.pipe()
    # A double fork: the middle process ends at once, and the kernel gives its child to the nearest subreaper.
    between = os.fork()
    if between == 0:
        try:
            child = os.fork()
        except OSError as error:
            os.write(pid_write, f"{-(error.errno or 1)}".encode())
            os._exit(1)
        if child == 0:
            for end in (pid_read, pid_write, exit_write):
                os.close(end)
            # This read returns when the last writing end closes, which the server does once it has waited for the
            # middle process: only then has the child its new parent, and may ask to die with it.
            os.read(exit_read, 1)
            os.close(exit_read)
            return 0
        os.write(pid_write, f"{child}".encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(pid_write)
    # Empty where the middle process was killed before it wrote.
    answer = int(os.read(pid_read, 32) or -errno.ECHILD)
    for end in (pid_read, exit_write, exit_read):
        os.close(end)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


def _kill(pid: int) -> None:
    """Kills a child that is not waited for yet, and all that it has started."""
    _kill_group(pid)
    os.kill(pid, signal.SIGKILL)  # it may not lead a group yet


def _kill_group(pid: int) -> None:
    """Kills what a worker has started and left; its number is taken for as long as one of these processes lives."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
