"""The program that starts the ranks of a pass: ``python -m apportion.script_check.sandbox.leader SPEC.json SOCKET``.

It makes the namespaces, of which all ranks are, and ends with everything in them as soon as the process that has
started it does. Three processes take part, each the parent of the next:

- the *guardian* stays outside. It gives the user namespace its users, and where its own parent dies it removes the
  records, as no other process would;
- the *maker* makes the namespaces and arranges the mounts;
- the *starter* is the first process in the namespace of process numbers: with it the kernel kills all others. It
  starts the ranks and reports them by lines on the socket: ``ready KIND``, ``refused REASON``, ``started RANK PID``
  and ``ended RANK STATUS``. It takes the lines ``start FILE`` and ``end``.

Where no namespace of process numbers can be had, the starter ends all its descendants one by one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from apportion.process import die_with_parent, take_orphans_in
from apportion.script_check.processes import family
from apportion.script_check.sandbox import linux, mounts, namespaces
from apportion.script_check.sandbox.scope import FileScope


class Starter:
    """Serves the lines of ``control``, see above, until the other end of ``guardian`` is closed."""

    def __init__(self, control: socket.socket, guardian: socket.socket) -> None:
        self._control, self._guardian = control, guardian
        self._shared_memory = mounts.existing()
        self._ranks = dict[int, int]()
        """The rank of each process that runs, by its number."""

    def serve(self) -> bool:
        """Start ranks and report them until the line ``end``, or the end of a socket, and end all descendants.
        Returns whether the line ended it."""
        woken, waker = os.pipe()
        for end in (woken, waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A signal handler in Python makes the end of a child readable in poll, without a race between a check and the
        # wait; it must be a handler, as an ignored or default signal writes nothing to the descriptor.
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
        # Before they are killed: a process that has ended has no maps.
        used = mounts.mapped(family(os.getpid())) - self._shared_memory
        for pid in self._ranks:
            _kill(-pid)
        while True:
            # Again and again until no child is left: a process may fork while others are killed, and those whose parent
            # ends become children of this process.
            for pid in _children():
                _kill(pid)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        mounts.remove(used)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _exec_rank(rank: dict[str, Any], parent: int, control: socket.socket) -> NoReturn:
    """Turns this process, forked from the starter, into a rank."""
    # A group of its own, by which the rank and what it starts are ended where /proc is missing.
    os.setsid()
    die_with_parent(parent)
    output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        os.chdir(rank["folder"])  # by its path, as the current folder is still that outside of the overlay
        # Python ignores some signals, and ignored ones stay ignored in the program that is run.
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


ENDED, ABANDONED, REFUSED = 0, 1, 2
"""How a maker ends: as its parent has asked for it, as that has died, or without namespaces."""
_DEVICES = ("/dev", "/proc")


def main(spec_path: str, descriptor: int) -> None:
    """Serve one pass, and end the process."""
    with open(spec_path) as file:
        spec: dict[str, Any] = json.load(file)
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    reasons = list[str]()
    for kind in spec["kinds"]:
        configuration = namespaces.CONFIGURATIONS.get(kind)
        if configuration is None:
            _leave(spec, _without_namespaces(kind, control, spec, reasons))
        if not namespaces.possible(configuration):
            reasons.append("this process is not the administrator's")
            continue
        status, reason = _attempt(kind, configuration, control, spec)
        if status != REFUSED:
            _leave(spec, status)
        reasons.append(reason)
    control.send(f"refused {_last(reasons)}\n".encode())


def _last(reasons: Sequence[str]) -> str:
    """The reason why the least demanding of the kinds that were tried was not possible."""
    return reasons[-1].replace("\n", " ") if reasons else ""


def _leave(spec: dict[str, Any], status: int) -> NoReturn:
    if status == ABANDONED:
        import shutil  # not needed otherwise

        shutil.rmtree(spec["remove"], ignore_errors=True)
    os._exit(0)


def _attempt(
    kind: str, configuration: namespaces.Configuration, control: socket.socket, spec: dict[str, Any]
) -> tuple[int, str]:
    """Runs a maker, and returns how it has ended, and why it could not make the namespaces."""
    here, there = socket.socketpair()
    guardian = os.getpid()
    maker = os.fork()
    if maker == 0:
        here.close()
        _run(lambda: _make(kind, configuration, control, there, spec, guardian))
    there.close()
    with here:
        # To map all users takes privileges in the namespace outside, where only this process still is.
        while (reason := here.recv(4096).decode()) == "users":
            here.send(b"yes" if namespaces.map_all_users(maker) else b"no")
        _, status = os.waitpid(maker, 0)  # with this end open, by which the starter knows that this process lives
    return (os.waitstatus_to_exitcode(status), reason) if os.WIFEXITED(status) else (ABANDONED, "")


def _run(serve: Callable[[], int]) -> NoReturn:
    """Ends a forked process with the status that a function returns, whatever happens in it."""
    status = ABANDONED
    try:
        status = serve()
    finally:
        os._exit(status)


def _make(
    kind: str,
    configuration: namespaces.Configuration,
    control: socket.socket,
    guardian: socket.socket,
    spec: dict[str, Any],
    guardian_pid: int,
) -> int:
    def map_all() -> bool:
        guardian.send(b"users")
        return guardian.recv(16) == b"yes"

    try:
        namespaces.enter(configuration, map_all)
        if configuration.processes:  # elsewhere what this process has started would outlive it
            die_with_parent(guardian_pid)  # after the change of credentials, which would cancel it
        mounts.protect(FileScope(**spec["scope"]), spec["records"], configuration.user)
        if not configuration.processes:
            # Last, as mounting needs the capabilities that this drops.
            namespaces.restrict_programs()
            return _start(kind, control, guardian)
        return _start_first(kind, control, guardian)
    except OSError as error:
        guardian.send((error.strerror or str(error)).encode())
        return REFUSED


def _start_first(kind: str, control: socket.socket, guardian: socket.socket) -> int:
    """Runs the starter as the first process of the namespace, and returns how it has ended."""
    starter = os.fork()
    if starter == 0:

        def serve() -> int:
            die_with_parent(0)  # the number of a parent outside
            try:
                # The /proc of the new namespace, as the old one shows process numbers that do not exist in it.
                linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
            except OSError as error:
                guardian.send((error.strerror or str(error)).encode())
                return REFUSED
            namespaces.restrict_programs()
            return _start(kind, control, guardian)

        _run(serve)
    guardian.close()
    _, status = os.waitpid(starter, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else ABANDONED


def _start(kind: str, control: socket.socket, guardian: socket.socket) -> int:
    take_orphans_in()
    guardian.send(b"ready")
    control.send(f"ready {kind}\n".encode())
    return ENDED if Starter(control, guardian).serve() else ABANDONED


def _without_namespaces(kind: str, control: socket.socket, spec: dict[str, Any], reasons: list[str]) -> int:
    """Runs a starter in no namespaces, and returns how it has ended."""
    here, there = socket.socketpair()
    starter = os.fork()
    if starter == 0:
        here.close()

        def serve() -> int:
            held = "hook"
            if kind == "landlock":
                try:
                    linux.allow_writes_only_in([spec["remove"], mounts.SHARED_MEMORY], _DEVICES)
                    held = "landlock"
                except OSError as error:
                    reasons.append(f"{_last(reasons)}, nor Landlock: {error.strerror}".removeprefix(", nor "))
            return _start(f"{held} {_last(reasons)}", control, there)

        _run(serve)
    there.close()
    with here:
        _, status = os.waitpid(starter, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else ABANDONED


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started it decides
    main(sys.argv[1], int(sys.argv[2]))
