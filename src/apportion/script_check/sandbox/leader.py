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
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from apportion.process import die_with_parent, take_orphans_in
from apportion.script_check.sandbox import landlock, linux, mounts, namespaces
from apportion.script_check.sandbox.scope import FileScope
from apportion.script_check.sandbox.starter import Starter

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
                    landlock.allow_writes_only_in([spec["remove"], mounts.SHARED_MEMORY], _DEVICES)
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
