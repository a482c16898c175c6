"""The processes of a run, from the driver: started, heard, watched and ended."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch.distributed as dist

from apportion.comm.channel import Lines, Message, SharedMemory
from apportion.entry import PROGRESS_BYTES
from apportion.errors import CheckpointError, WorkerFailed
from apportion.job import Job
from apportion.launch.local import Local, Process
from apportion.supervise import Action, Exited, Finished, Happening, Late, Raised, Stop, next_action

LOOK_SECONDS = 0.5
"""Between two looks at every rank's progress."""
LATE_SECONDS, LATE_STEPS, LATE_FIRST = 30.0, 20, 2
"""A rank is late after others have waited for it this long, or so many of the slowest steps so far, or so many of the
first one, which may have compiled the network: whichever is most."""
FIRST_SECONDS = 900.0
"""Before anything moves: data sets are opened, networks compiled."""
GONE_SECONDS = 5.0


class Crew:
    """So many worker processes that run ``target`` (``module:function``) on a job."""

    def __init__(self, launcher: Local, target: str, job: Job, ranks: int) -> None:
        self.ranks = ranks
        self._memory = SharedMemory()
        progress = np.frombuffer(self._memory.map("progress", PROGRESS_BYTES * ranks), dtype=np.int64)
        self._watch: Watch | None = Watch(progress.reshape(ranks, -1))
        self._happened: list[Happening] = []
        self._last = time.monotonic()
        self._kills = _memory_kills()
        self._selector = selectors.DefaultSelector()
        self._store: Any = None
        self._processes: list[Process] = []
        self._lines: list[Lines] = []
        try:
            self._store = _meeting_place() if ranks > 1 else None
            port = self._store.port if self._store is not None else 0
            self._processes = launcher.start(target, cloudpickle.dumps(job), ranks, port)
            for rank, process in enumerate(self._processes):
                self._lines.append(Lines(process.channel))
                self._selector.register(process.channel, selectors.EVENT_READ, rank)
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [p.pid for p in self._processes]

    def send(self, order: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """An order to these ranks (None: all)."""
        for rank in range(self.ranks) if ranks is None else ranks:
            try:
                self._lines[rank].send(order)
            except OSError:
                pass  # it is gone; its exit says so

    def hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """What ranks say within this time; returns at the first words. What happens to them is noted."""
        # Whoever had ended before we listened, and is silent now, has nothing more to say, even where a process that it
        # has started holds its channel open.
        listened = {key.data: key.fileobj for key in self._selector.get_map().values()}
        ended = {rank for rank in listened if self._processes[rank].returncode() is not None}
        ready = self._selector.select(0.0 if ended else max(0.0, seconds))
        for rank in ended - {key.data for key, _ in ready}:
            self._selector.unregister(listened[rank])
            self._note_exit(rank)
        for key, _ in ready:
            rank = key.data
            messages = self._lines[rank].receive()
            if messages is None:
                self._selector.unregister(key.fileobj)
                self._note_exit(rank)
                continue
            for message in messages:
                if message["kind"] == "shared":
                    self._lines[rank].send({"kind": "shared"}, self._memory.fd(message["name"], message["nbytes"]))
                elif message["kind"] in ("raised", "finished"):
                    self._note_message(rank, message)
                else:
                    yield rank, message

    def _note(self, happening: Happening) -> None:
        self._happened.append(happening)
        self._last = time.monotonic()

    def _note_message(self, rank: int, message: Message) -> None:
        if message.pop("kind") == "finished":
            self._note(Finished(rank))
        else:
            self._note(Raised(rank, **message))

    def _note_exit(self, rank: int) -> None:
        code = self._processes[rank].wait(GONE_SECONDS)
        if code is None:  # it closed its channel and lives on: it can no longer be led
            self._processes[rank].kill()
            code = self._processes[rank].wait(GONE_SECONDS)
        self._note(Exited(rank, code if code is not None else -9, out_of_memory=_memory_kills() > self._kills))

    def action(self) -> Action:
        """What to do about all that happened so far."""
        late = self._watch.late(time.monotonic()) if self._watch is not None else None
        if late is not None and not any(isinstance(h, Late) for h in self._happened):
            stopped = tuple(rank for rank, process in enumerate(self._processes) if _is_stopped(process.pid))
            self._note(replace(late, ranks=stopped or late.ranks, stopped=bool(stopped)))
        return next_action(self._happened, self.ranks, time.monotonic() - self._last)

    def ask(self, order: Mapping[str, Any], kind: str, seconds: float) -> list[Message]:
        """An order to all ranks and their answers of this kind, by rank. WorkerFailed where one fails instead."""
        self.send(order)
        return self.answers(kind, seconds)

    def answers(self, kind: str, seconds: float) -> list[Message]:
        """One message of this kind from every rank."""
        given: dict[int, Message] = {}
        deadline = time.monotonic() + seconds
        while len(given) < self.ranks:
            for rank, message in self.hear(min(LOOK_SECONDS, deadline - time.monotonic())):
                if message["kind"] == kind:
                    given[rank] = message
            action = self.action()
            if isinstance(action, Stop):
                raise failure(action)
            if time.monotonic() > deadline:
                missing = ", ".join(str(r) for r in range(self.ranks) if r not in given)
                raise WorkerFailed(f"rank {missing} did not answer within {seconds:.0f} s")
        return [given[rank] for rank in range(self.ranks)]

    def part(self) -> None:
        """Wait until ranks that are done have ended by themselves."""
        deadline = time.monotonic() + GONE_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            for _ in self.hear(deadline - time.monotonic()):
                pass

    def close(self) -> None:
        """End every process, wait until they are gone, and let go of what they shared."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(GONE_SECONDS)
        for lines in self._lines:
            lines.close()
        self._selector.close()
        self._watch = None  # it maps the memory
        self._memory.close()
        self._store = None


def failure(stop: Stop) -> Exception:
    """What the decision to stop is raised as: the user's mistake, or what could not be done."""
    if stop.mistake:
        return ValueError(stop.cause)
    if stop.checkpoint:
        return CheckpointError(stop.cause)
    return WorkerFailed(stop.cause, rank=stop.rank, traceback=stop.traceback, where=stop.where)


def _meeting_place() -> Any:
    """Where the ranks find each other: reachable from this host alone."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class Watch:
    """Finds the ranks that the others wait for, from each rank's line: what it got done, and whether it waits."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._looked = time.monotonic()
        self._seen = lines[:, 0].copy()
        self._still = self._waited = 0.0
        """Seconds since something moved; and of these, while a rank waited."""
        self._first: float | None = None
        self._slowest = 0.0

    def late(self, now: float) -> Late | None:
        """The ranks that have kept the others waiting for too long."""
        # Not while nobody looked: the driver may have been stopped, or busy with the events.
        passed = min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        self._still += passed
        done, waiting = self._lines[:, 0].copy(), self._lines[:, 1] != 0
        if (done != self._seen).any():
            self._move(done)
            return None
        self._waited = self._waited + passed if waiting.any() else 0.0
        if self._waited <= self._allowed():
            return None
        late = np.flatnonzero(~waiting).tolist() or list(range(len(done)))
        return Late(tuple(late), int(self._lines[:, 2].max()), self._waited)

    def _move(self, done: Any) -> None:
        if self._first is None:
            self._first = self._still
        else:
            self._slowest = max(self._slowest, self._still)
        self._seen, self._still, self._waited = done, 0.0, 0.0

    def _allowed(self) -> float:
        if self._first is None:
            return FIRST_SECONDS
        return max(LATE_SECONDS, LATE_STEPS * self._slowest, LATE_FIRST * self._first)


def _is_stopped(pid: int) -> bool:
    """Is a process stopped, by a signal or a debugger? Known on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _memory_kills() -> int:
    """How many processes the kernel has killed for memory, as far as this one is told."""
    return sum(map(_kills_in, _memory_counters()))


def _kills_in(path: str) -> int:
    try:
        entries = dict(line.split() for line in Path(path).read_text().splitlines())
        return int(entries["oom_kill"])
    except (OSError, ValueError, KeyError):
        return 0


def _memory_counters() -> Iterator[str]:
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield f"/sys/fs/cgroup{path}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory{path}/memory.oom_control"
    except (OSError, ValueError):
        pass
    yield "/sys/fs/cgroup/memory.events"
    yield "/proc/vmstat"
