"""The driver's side of a sandbox: opens one, starts ranks in it, waits for them, and ends it."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from apportion.errors import ApportionError
from apportion.script_check.sandbox import mounts
from apportion.script_check.sandbox.mirror import Mirror
from apportion.script_check.sandbox.namespaces import CONFIGURATIONS
from apportion.script_check.sandbox.scope import FileScope

KINDS = (*CONFIGURATIONS, "landlock")
"""The kinds of sandbox, in the order in which they are tried."""
FORCED = "APPORTION_SANDBOX"
"""The variable that names the only kind to try, for tests: one of ``KINDS``, or "hook" for the last resort."""
_READY_SECONDS = 30.0
_END_SECONDS = 20.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Command:
    """A rank to start: a program with its arguments and its environment, and the file that takes what it prints."""

    program: Sequence[str]
    environment: Mapping[str, str]
    output: Path


class Rank:
    """A process of a sandbox, as ``subprocess.Popen`` shows one."""

    def __init__(self, sandbox: Sandbox, number: int) -> None:
        self._sandbox, self.number = sandbox, number
        self.pid = 0
        """The number of the process, as this process sees it."""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the status with which the process has ended; None while it runs."""
        self._sandbox.receive(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"rank {self.number}", timeout or 0.0)
            self._sandbox.receive(left)
        assert self.returncode is not None
        return self.returncode


class Sandbox:
    """A sandbox that is open. Every rank that is started in it sees what the others have written; what they write is
    discarded with it.

    ``records``: the folder that they and this process both see; ``remove``: the one, around it, that is removed where
    this process is killed. ``kind``: the only kind to try. Raises ApportionError where none can be had, and ValueError
    where the script's folder is too large for a copy.
    """

    def __init__(self, scope: FileScope, records: Path, remove: Path, kind: str | None = None) -> None:
        self._scope, self._records = scope, Path(os.path.realpath(records))
        kind = kind or os.environ.get(FORCED) or None
        (self._records / mounts.STAGE).mkdir(parents=True)
        spec = {
            "scope": asdict(scope),
            "records": str(self._records),
            "remove": os.path.realpath(remove),
            "kinds": KINDS if kind is None else (kind,),
        }
        (self._records / "sandbox.json").write_text(json.dumps(spec))
        self._ranks = list[Rank]()
        self._control, theirs = socket.socketpair()
        if sys.platform == "linux":
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Closed here once the leader has it: the end of the leader then shows as the end of the stream.
        with theirs:
            self._leader = subprocess.Popen(
                [
                    *(sys.executable, "-m", "apportion.script_check.sandbox.leader"),
                    *(str(self._records / "sandbox.json"), str(theirs.fileno())),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the terminal reaches this process alone
            )
        self._shared_memory = mounts.existing()
        self._ready, self._refused, self._closed = "", "", False
        self._mirror: Mirror | None = None

    def __enter__(self) -> Sandbox:
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def kind(self) -> str:
        """The kind that it is: one of ``KINDS`` or "hook"."""
        return next(kind for kind in (*KINDS, "hook") if self._ready.startswith(kind))

    @property
    def sentence(self) -> str:
        """Says how the user's files are protected."""
        if self._mirror is None:
            return (
                f"The script ran in a sandbox: writes to {_listed(self._scope.needed)} and temporary folders were "
                "discarded; others, and connections beyond loopback, were refused."
            )
        refused = self._ready.removeprefix(self.kind).strip()
        because = f" as the kernel allows no namespaces here ({refused})" if refused else ""
        if self.kind == "landlock":
            held = (
                "the kernel refused every write outside of it and of /dev/shm; Python's own connections beyond "
                "loopback were refused, but not those of programs that it starts and of compiled libraries"
            )
        else:
            held = (
                "Python's own writes outside of it and of /dev/shm and its connections beyond loopback were refused, "
                "but not those of programs that it starts and of compiled libraries"
            )
        return f"The script ran in a copy of {self._scope.folder}{because}: {held}."

    def path(self, path: str | Path) -> str:
        """Returns where the script sees a file of the user's."""
        return str(path) if self._mirror is None else self._mirror.path(str(path))

    def argument(self, argument: str) -> str:
        """Returns an argument of the script, with a path in it as the script is to see it."""
        return argument if self._mirror is None else self._mirror.argument(argument)

    def start(self, commands: Sequence[Command]) -> list[Rank]:
        """Start ranks, numbered from 0, in the current folder as the script sees it."""
        described = [
            {
                "rank": len(self._ranks) + number,
                "command": self._program(command),
                "environment": {**command.environment, **self._environment(command.environment)},
                "output": str(command.output),
                "folder": self.path(os.getcwd()),
            }
            for number, command in enumerate(commands)
        ]
        file = self._records / f"start{len(self._ranks)}.json"
        file.write_text(json.dumps(described))
        file.chmod(0o600)
        started = [Rank(self, each["rank"]) for each in described]  # type: ignore[arg-type]
        self._ranks += started
        self._control.sendall(f"start {file}\n".encode())
        deadline = time.monotonic() + _READY_SECONDS
        while any(not rank.pid and rank.returncode is None for rank in started) and time.monotonic() < deadline:
            self.receive(deadline - time.monotonic())
        return started

    def receive(self, timeout: float | None) -> None:
        """Take what the starter reports; wait for it for ``timeout`` seconds, or without end."""
        if self._closed or not select.select([self._control], [], [], timeout)[0]:
            return
        try:
            data, ancillary, _, _ = self._control.recvmsg(65536, socket.CMSG_SPACE(_CREDENTIALS.size))
        except ConnectionResetError:
            data, ancillary = b"", []
        if not data:
            self._set_closed()
        # In a namespace of its own a process has another number than here; the kernel translates the one in the
        # credentials.
        sender = next((_CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0] for _, _, content in ancillary), 0)
        for line in data.decode().splitlines():
            self._handle_report(line, sender)

    def close(self) -> None:
        """End all processes of the sandbox and wait for it."""
        try:
            self._control.sendall(b"end\n")
        except OSError:  # it has ended already
            pass
        try:
            # The leader ends once all processes of the sandbox have, so that nothing of the script runs after this.
            self._leader.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._leader.kill()
            self._leader.wait()
        self.receive(0)
        self._control.close()
        self._set_closed()
        if self._mirror is not None:
            mounts.remove(mounts.abandoned(mounts.existing() - self._shared_memory))

    def _set_closed(self) -> None:
        self._closed = True
        for rank in self._ranks:
            rank.returncode = -9 if rank.returncode is None else rank.returncode

    def _handle_report(self, line: str, sender: int) -> None:
        word, _, rest = line.partition(" ")
        if word == "started":
            number, own = map(int, rest.split())
            self._ranks[number].pid = sender or own
        elif word == "ended":
            number, status = map(int, rest.split())
            self._ranks[number].returncode = status
        elif word == "ready":
            self._ready = rest
        elif word == "refused":
            self._refused = rest

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not self._ready:
            if self._refused:
                raise ApportionError(f"no sandbox of this kind can be had: {self._refused}")
            if self._closed or time.monotonic() > deadline:
                raise ApportionError("the process that starts the ranks has ended or does not answer")
            self.receive(deadline - time.monotonic())
        if self.kind not in CONFIGURATIONS:
            self._mirror = Mirror.build(self._records / "mirror", self._scope, writable=self._records)

    def _program(self, command: Command) -> list[str]:
        """A program of this Python in a copy is run under the hook that refuses writes elsewhere."""
        program = list(command.program)
        if self._mirror is None:
            return program
        assert program[:2] == [sys.executable, "-m"]
        return [*program[:2], "apportion.script_check.sandbox.guarded", str(self._mirror.description), *program[2:]]

    def _environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables that differ in the sandbox."""
        changed = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK, "TP_SOCKET_IFNAME": _LOOPBACK}
        return changed if self._mirror is None else {**changed, **self._mirror.environment(environment)}


_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths)
