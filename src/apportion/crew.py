"""The processes of a run, from the driver: started, heard, watched and ended."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch.distributed as dist

from apportion.comm.channel import Lines, Message, SharedMemory
from apportion.entry import PROGRESS_BYTES
from apportion.errors import WorkerFailed
from apportion.job import Job
from apportion.launch.local import Local, Process
from apportion.supervise import Action, Exited, Finished, Happening, Late, Raised, Stop, next_action

LOOK_SECONDS = 0.5
"""Between two looks at every rank's progress."""
LATE_SECONDS, LATE_STEPS = 60.0, 20
"""A rank is late after this long, or so many of the slowest steps so far, whichever is more."""
FIRST_SECONDS = 900.0
"""Before anything moves: data sets are opened, networks compiled."""
GONE_SECONDS = 5.0


class Crew:
    """So many worker processes that run ``target`` (``module:function``) on a job."""

    def __init__(self, launcher: Local, target: str, job: Job, ranks: int) -> None:
        self.ranks = ranks
        self._memory = SharedMemory()
        self._progress = np.frombuffer(self._memory.map("progress", PROGRESS_BYTES * ranks), dtype=np.int64)
        self._watch = _Watch(self._progress.reshape(ranks, -1))
        self._happened: list[Happening] = []
        self._last = time.monotonic()
        self._kills = _memory_kills()
        self._selector = selectors.DefaultSelector()
        self._store: Any = (
            dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
            if ranks > 1
            else None
        )
        port = self._store.port if self._store is not None else 0
        self._processes: list[Process] = []
        self._lines: list[Lines] = []
        try:
            self._processes = launcher.start(target, cloudpickle.dumps(job), ranks, port)
        finally:
            self._lines = [Lines(p.channel) for p in self._processes]
        for rank, lines in enumerate(self._lines):
            self._selector.register(lines.socket, selectors.EVENT_READ, rank)

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
        for key, _ in self._selector.select(max(0.0, seconds)):
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
        late = self._watch.late()
        if late is not None and not any(isinstance(h, Late) for h in self._happened):
            self._note(late)
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

    def drain(self) -> Iterator[tuple[int, Message]]:
        """What ranks that are ending still have to say."""
        while self._selector.get_map():
            before = len(self._selector.get_map())
            yield from self.hear(0.0 if before == 0 else GONE_SECONDS)
            if isinstance(self.action(), Stop):
                return

    def close(self) -> None:
        """End every process, wait until they are gone, and let go of what they shared."""
        for process in self._processes:
            if process.returncode() is None:
                process.kill()
        for process, lines in zip(self._processes, self._lines, strict=True):
            process.wait(GONE_SECONDS)
            lines.close()
        self._selector.close()
        self._memory.close()
        self._store = None


def failure(stop: Stop) -> Exception:
    """What the decision to stop is raised as: the user's mistake, or a worker that failed."""
    if stop.mistake:
        return ValueError(stop.cause.removeprefix("ValueError: "))
    return WorkerFailed(stop.cause, rank=stop.rank, traceback=stop.traceback)


class _Watch:
    """Finds the ranks that the others wait for, from each rank's line: what it got done, and whether it waits."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._began = self._moved = time.monotonic()
        self._seen = lines[:, 0].copy()
        self._slowest = 0.0

    def late(self) -> Late | None:
        """The ranks that have kept everyone from moving for too long."""
        now, done = time.monotonic(), self._lines[:, 0].copy()
        if (done != self._seen).any():
            if self._seen.any():
                self._slowest = max(self._slowest, now - self._moved)
            self._seen, self._moved = done, now
            return None
        allowed = max(LATE_SECONDS, LATE_STEPS * self._slowest) if done.any() else FIRST_SECONDS
        if now - self._moved < allowed:
            return None
        waiting = self._lines[:, 1].astype(bool)
        late = [int(r) for r in np.flatnonzero(~waiting)] or list(range(len(done)))
        return Late(tuple(late), int(self._lines[:, 2].max()), now - self._moved)


def _memory_kills() -> int:
    """How many processes the kernel has killed for memory in this container or host."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
        except (OSError, ValueError):
            continue
    return 0
