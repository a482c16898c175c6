"""Starts the ranks of a pass, reports their ends, and leaves no process behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from apportion.process import die_with_parent
from apportion.script_check.processes import family
from apportion.script_check.sandbox import shared_memory


class Starter:
    """Serves the lines of ``control``, see ``leader.py``, until the other end of ``guardian`` is closed."""

    def __init__(self, control: socket.socket, guardian: socket.socket) -> None:
        self._control, self._guardian = control, guardian
        self._shared_memory = shared_memory.existing()
        self._ranks = dict[int, int]()
        """The rank of each process that runs, by its number."""

    def serve(self) -> bool:
        """Start ranks and report them until the line ``end``, or the end of a socket, and end all descendants.
        Returns whether the line ended it."""
        woken, waker = os.pipe()
        for end in (woken, waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        poll.register(self._guardian, select.POLLIN)
        asked = False
        try:
            while not asked:
                for descriptor, _ in poll.poll():
                    if descriptor == woken:
                        os.read(woken, 4096)
                        self._report_ends()
                    elif descriptor == self._guardian.fileno() or not (lines := self._control.recv(65536).decode()):
                        return False
                    else:
                        asked = any(self._handle_order(line) for line in lines.splitlines())
        except OSError:  # the other end is closed
            return False
        finally:
            self._end_descendants()
        return asked

    def _handle_order(self, line: str) -> bool:
        """Does what a line says; returns whether it is the last one."""
        word, _, rest = line.partition(" ")
        if word == "start":
            with open(rest) as file:
                ranks: list[dict[str, Any]] = json.load(file)
            for rank in ranks:
                self._start(rank)
        return word == "end"

    def _start(self, rank: dict[str, Any]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._ranks[pid] = rank["rank"]
            return
        try:
            _exec_rank(rank, parent, self._control)
        finally:
            os._exit(127)

    def _report_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._ranks:
                self._control.send(f"ended {self._ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n".encode())

    def _end_descendants(self) -> None:
        """Kills all descendants of this process (Linux), or the groups of all ranks: those whose own parent ends become
        its children. Removes the shared memory that they used, which the killed processes do not."""
        used = shared_memory.mapped(family(os.getpid())) - self._shared_memory
        for pid in self._ranks:
            _kill(-pid)
        while True:
            for pid in _children():
                _kill(pid)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        shared_memory.remove(used)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _exec_rank(rank: dict[str, Any], parent: int, control: socket.socket) -> NoReturn:
    """Turns this process, forked from the starter, into a rank."""
    os.setsid()
    die_with_parent(parent)
    output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        os.chdir(rank["folder"])  # by its path, as the current folder is still that outside of the overlay
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # the kernel attaches this process's number as the receiver sees it
        control.send(f"started {rank['rank']} {os.getpid()}\n".encode())
        os.execve(rank["command"][0], rank["command"], rank["environment"])
    except OSError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(127)


def _children() -> list[int]:
    found = list[int]()
    if not os.path.exists("/proc/self"):
        return found
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == os.getpid():
                found.append(int(name))
    return found
