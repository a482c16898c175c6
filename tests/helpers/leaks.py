"""What a test may not leave behind: processes, listening ports, shared memory, temporary files.

Only what this run of the tests made counts, whatever else runs on the machine: its processes carry a mark in their
environment, and its temporary files have a folder of their own.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import warm_python
import warm_ranks

MARK = "APPORTION_TEST_SESSION"
GRACE_SECONDS = 2.0
"""How long what is ending may take to be gone."""

SHARED_MEMORY = Path("/dev/shm")
HELPERS = (
    "apportion.runtime.spawn.template",
    "warm_template.py",
    "model_template.py",
    "vision_template.py",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
)
"""Children of the driver that it keeps for as long as it lives. One of each, and nothing below them."""
FOREIGN_FILES = ("torchelastic_", "torchinductor_", "pymp-", ".org.chromium", "org.chromium", "pytest-of-")
"""What other programs leave in the temporary folder, and how it begins."""


@dataclass(frozen=True)
class Snapshot:
    """What there was before a test."""

    processes: frozenset[int]
    ports: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]
    memfds: frozenset[tuple[int, str]]
    files: frozenset[str]


class Watch:
    """Compares what there is after a test with what there was before it."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._mark = os.environ.setdefault(MARK, f"{os.getpid()}.{time.time_ns()}")
        self._helpers: dict[str, psutil.Process] = {}

    def look(self) -> Snapshot:
        """What there is now. Costs a fraction of a millisecond."""
        return Snapshot(
            processes=frozenset(psutil.pids()),
            ports=frozenset(self._ports()),
            shared_memory=frozenset(_names(SHARED_MEMORY)),
            memfds=frozenset(self._memfds()),
            files=frozenset(_names(self._temporary)),
        )

    def leaks(self, before: Snapshot, *, grace: float = GRACE_SECONDS) -> list[str]:
        """One line for each thing that is here now, was not before, and does not go within the grace period.
        Processes among them are ended, so that the next test finds the machine as it should be."""
        deadline = time.monotonic() + grace
        while True:
            processes = self._new_processes(before)
            found = [*map(_describe, processes), *self._other(before)]
            if not found or time.monotonic() > deadline:
                break
            gc.collect()  # what only a cycle holds is not a leak
            time.sleep(0.02)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        while any(map(_lives, processes)):  # a kill takes effect when the process is next to run
            time.sleep(0.01)
        return found

    def _new_processes(self, before: Snapshot) -> list[psutil.Process]:
        found = []
        kept = before.processes | warm_ranks.processes() | warm_python.processes()
        for pid in set(psutil.pids()) - kept:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                ours = self._is_ours(process) and not self._is_helper(process)
                if ours and not self._was_there_before(process.parents(), before):
                    found.append(process)
        return sorted(found, key=lambda p: p.pid)

    def _is_ours(self, process: psutil.Process) -> bool:
        if not _lives(process):
            return False
        if os.getpid() in (parent.pid for parent in process.parents()):
            return True
        try:
            environment = process.environ()
            if not environment:  # it has just begun its program
                time.sleep(0.05)
                environment = process.environ()
        except psutil.AccessDenied:
            return False
        return bool(environment.get(MARK) == self._mark)  # its parent is gone: an orphan

    def _was_there_before(self, parents: list[psutil.Process], before: Snapshot) -> bool:
        """Whether one of these is a program that has been running since before the test, such as the server of a whole
        file: what it starts is its own, and ends with it."""
        for parent in parents:
            if parent.pid == os.getpid():
                return False
            if parent.pid in before.processes and self._is_ours(parent) and not self._is_helper(parent):
                return True
        return False

    def _is_helper(self, process: psutil.Process) -> bool:
        command = " ".join(process.cmdline())
        name = next((h for h in HELPERS if h in command), None)
        if name is None or process.ppid() != os.getpid():
            return False
        known = self._helpers.get(name)
        if known is None or not _lives(known):
            known = self._helpers[name] = process
        return known == process

    def _other(self, before: Snapshot) -> Iterator[str]:
        now = self.look()
        for pid, address in sorted(now.ports - before.ports):
            yield f"port: process {pid} listens on {address}"
        for pid, name in sorted(now.memfds - before.memfds):
            yield f"shared memory: process {pid} holds {name}"
        for name in sorted(now.shared_memory - before.shared_memory):
            if not self._is_held_by_others(SHARED_MEMORY / name):
                yield f"shared memory: {SHARED_MEMORY / name}"
        for name in sorted(now.files - before.files):
            if not name.startswith(FOREIGN_FILES):
                yield f"temporary file: {self._temporary / name}"

    def _keepers(self) -> Iterator[psutil.Process]:
        """The processes that live from one test to the next, and could gather things."""
        yield psutil.Process()
        yield from filter(_lives, self._helpers.values())

    def _ports(self) -> Iterator[tuple[int, str]]:
        listening = {f"socket:[{inode}]": address for inode, address in _listening()}
        for process in self._keepers():
            for _, target in _descriptors(process.pid):
                if target in listening:
                    yield process.pid, listening[target]

    def _memfds(self) -> Iterator[tuple[int, str]]:
        for process in self._keepers():
            for fd, target in _descriptors(process.pid):
                if target.startswith("/memfd:apportion"):
                    yield process.pid, f"{target} as descriptor {fd}"

    def _is_held_by_others(self, path: Path) -> bool:
        """Does a process that is none of ours map or hold this file? Slow: asked only about what looks like a leak."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or self._is_ours(process):
                    continue
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                if f" {path}\n" in maps or any(file.path == str(path) for file in process.open_files()):
                    return True
        return False


def _names(folder: Path) -> Collection[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """The open descriptors of a process, and what each of them is."""
    folder = Path(f"/proc/{pid}/fd")
    for fd in _names(folder):
        with suppress(OSError):
            yield fd, os.readlink(folder / fd)


def _listening() -> Iterator[tuple[int, str]]:
    """The TCP sockets that listen, by inode, with address and port. They are asked for over netlink: the tables in
    /proc hold every connection of the last minute too, and to read them took longer than most tests."""
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # 4: NETLINK_SOCK_DIAG
        netlink.settimeout(5.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 0, 0, 1 << 10)  # 10: TCP_LISTEN
            netlink.send(struct.pack("=IHHII", 16 + len(wanted), 20, 0x301, 1, 0) + wanted)  # 20: by family; a dump
            yield from _sockets(netlink)


def _sockets(netlink: socket.socket) -> Iterator[tuple[int, str]]:
    """The answers to one question: struct inet_diag_msg, as linux/inet_diag.h has it."""
    while True:
        answer = netlink.recv(1 << 16)
        while answer:
            length, kind = struct.unpack_from("=IH", answer)
            if kind != 20:  # the end, or an error
                return
            family, port, source = struct.unpack_from("!B3xH2x16s", answer, 16)
            address = ipaddress.ip_address(source if family == socket.AF_INET6 else source[:4])
            yield struct.unpack_from("=I", answer, 16 + 68)[0], f"{address}:{port}"
            answer = answer[(length + 3) & ~3 :]


def _lives(process: psutil.Process) -> bool:
    """A process that has ended and is not waited for yet (a zombie) does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        command = " ".join(process.cmdline()) or process.name()
        return f"process: {process.pid}, child of {process.ppid()}: {command[:200]}"
    return f"process: {process.pid}"
