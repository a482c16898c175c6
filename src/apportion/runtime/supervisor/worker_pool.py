"""Manages the processes of a run from the driver: starts, hears, watches, replaces and ends them.

Each has a seat, which a process that replaces it takes over; its rank is its place among the seats that are taken.
"""

from __future__ import annotations

import dataclasses
import selectors
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import torch.distributed as dist

from apportion.comm.channel import Lines, Message, SharedMemoryOwner
from apportion.comm.membership import Membership
from apportion.core.policy import Policy
from apportion.errors import CheckpointError, NotFinite, RanksDiffer, WorkerFailed
from apportion.process import is_stopped
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.launch.local import Local, Process
from apportion.runtime.spawn.standby import Spare
from apportion.runtime.supervisor.decisions import Action, Stop, next_action
from apportion.runtime.supervisor.failures import (
    WorkerBegan,
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    WorkerRaised,
    WorkersChanged,
    WorkerStalled,
)
from apportion.runtime.supervisor.watchdog import (
    LOOK_SECONDS,
    Allowance,
    UnresponsiveDetector,
    Watchdog,
    memory_kills,
)
from apportion.runtime.worker import progress
from apportion.runtime.worker.job import Job, WorkerJob

GONE_SECONDS = 5.0
KILL_SECONDS = 30.0
"""The seconds that a killed worker may take to end: it is not replaced before, since it could write to what it
shares."""


class WorkerPool:
    """Worker processes that run ``target`` (``module:function``) on a job, one for each rank."""

    def __init__(self, launcher: Local, target: str, job: WorkerJob, ranks: int) -> None:
        self._launcher, self._target, self._job, self._payload = launcher, target, job, cloudpickle.dumps(job)
        self._replaceable = isinstance(job, Job) and job.replaceable
        self._policy = job.policy if isinstance(job, Job) else Policy()
        self.ranks = self._at_first = ranks
        self._happened: list[WorkerEvent] = []
        self._last = self._began = time.monotonic()
        self._kills = memory_kills()
        self._stopping = self._begun = False
        self._selector = selectors.DefaultSelector()
        self._awake, self._wake = socket.socketpair()
        for end in (self._awake, self._wake):
            end.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._processes: dict[int, Process] = {}
        """The processes by seat, as everything is that belongs to a process."""
        self._lines: dict[int, Lines] = {}
        self._late_by: dict[int, float] = {}
        self._store: Any = None
        self._memory = SharedMemoryOwner()
        self.watch: Watchdog | None = None
        self.spare: Spare | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._places, self._seats = self.ranks, list(range(self.ranks))
        """The number of seats, and the seat of each rank."""
        self.watch = Watchdog(progress.lines(self._memory.map("progress", progress.NBYTES * self.ranks)))
        self._members: Membership | None = None
        if self._replaceable:
            memory = memoryview(self._memory.map("members", Membership.nbytes(self.ranks)))
            self._members = Membership(memory, self.ranks)
            self._members.begin()
        self._store = _meeting_place() if self.ranks > 1 else None
        self._port = self._store.port if self._store is not None else 0
        for seat, process in enumerate(self._launcher.start(self._target, self._payload, self.ranks, self._port)):
            self._seat(seat, process)

    def _seat(self, seat: int, process: Process) -> None:
        self._processes[seat], self._lines[seat] = process, Lines(process.channel)
        self._late_by[seat] = time.monotonic() - self._began
        self._selector.register(process.channel, selectors.EVENT_READ, seat)
        process.when_ended(self.wake)

    def pids(self) -> list[int]:
        """Returns the process ids by rank; none while all are started again."""
        processes = self._processes
        return [processes[seat].pid for seat in list(self._seats) if seat in processes]

    def wake(self) -> None:
        """Makes ``hear`` return now; may be called from any thread."""
        try:
            self._wake.send(b".")
        except OSError:
            pass  # it is full, which wakes too; or closed

    def send(self, order: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Sends an order to these ranks (None: to all; "stop" also goes to workers that are seated later)."""
        self._stopping = self._stopping or order["kind"] == "stop"
        seats = list(self._seats)
        for seat in seats if ranks is None else [seats[rank] for rank in ranks]:
            try:
                self._lines[seat].send(order)
            except (OSError, KeyError):
                pass  # it is gone; its exit says so

    def hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields what ranks say within this time, and returns at the first words. What happens to the ranks is
        noted."""
        if self._members is not None:
            self._members.tick()
        # Whoever had ended before we listened, and is silent now, has nothing more to say, even where a process that it
        # has started holds its channel open.
        ended = {seat for seat in self._listened() if self._processes[seat].returncode() is not None}
        ready = self._selector.select(0.0 if ended else max(0.0, seconds))
        for seat in ended - {key.data for key, _ in ready}:
            self._note_exit(seat)
        for key, _ in ready:
            seat = key.data
            if seat is None:
                self._awake.recv(4096)
                continue
            messages = self._lines[seat].receive()
            if messages is None:
                self._note_exit(seat)
                continue
            for message in messages:
                if message["kind"] == "shared":
                    self._hand_out(seat, message)
                elif message["kind"] in ("raised", "finished"):
                    self._note_message(seat, message)
                else:
                    yield self._seats.index(seat), self._dated(seat, message)

    def _listened(self) -> list[int]:
        """Returns the seats whose processes may still say something."""
        return [key.data for key in (self._selector.get_map() or {}).values() if key.data is not None]

    def _hand_out(self, seat: int, asked: Message) -> None:
        reply = {"kind": "shared", "name": asked["name"]}
        try:
            given = [self._memory.fd(asked["name"], asked["nbytes"])]
        except OSError as error:
            given, reply = [], {**reply, "refused": error.strerror or str(error)}
        try:
            self._lines[seat].send(reply, *given)
        except OSError:
            pass  # it is gone; its exit says so

    def _dated(self, seat: int, message: Message) -> Message:
        """Adds the time before its start to the seconds of a replacement's event: it counts from its own start."""
        if message["kind"] == "event" and self._late_by[seat] > 0.0:
            message["event"]["seconds"] += self._late_by[seat]
        return message

    def _note(self, happening: WorkerEvent) -> None:
        self._happened.append(happening)
        self._last = time.monotonic()

    def _note_message(self, seat: int, message: Message) -> None:
        rank = self._seats.index(seat)
        if message.pop("kind") == "finished":
            self._note(WorkerFinished(rank))
        else:
            self._note(WorkerRaised(rank, **message, step=self._seen_by(seat)))

    def _note_exit(self, seat: int) -> None:
        process = self._processes[seat]
        self._selector.unregister(process.channel)
        code = process.wait(GONE_SECONDS)
        if code is None:  # it closed its channel and lives on: it can no longer be led
            process.kill()
            code = process.wait(GONE_SECONDS)
        starved = memory_kills() > self._kills
        code = code if code is not None else -9
        self._note(WorkerExited(self._seats.index(seat), code, out_of_memory=starved, step=self._seen_by(seat)))

    @property
    def step(self) -> int:
        """The number of updates made, as far as the ranks show it."""
        return self.watch.step if self.watch is not None else 0

    def _seen_by(self, seat: int) -> int:
        """Returns the updates that the worker in this seat had seen made: its own count, where each worker trains on
        its own."""
        return self.watch.step_of(seat) if self.watch is not None else 0

    def action(self) -> Action:
        """Decides what to do about all that has happened so far."""
        if self._replaceable and not self._begun and self.watch is not None and self.watch.begun:
            self._begun = True
            self._note(WorkerBegan())
        if self.watch is not None:
            stopped = [rank for rank, pid in enumerate(self.pids()) if is_stopped(pid)]
            late = self.watch.late(time.monotonic(), stopped)
            if late is not None and not any(isinstance(h, WorkerStalled) for h in self._now()):
                stopped = stopped if not late.stopped else []
                self._note(
                    dataclasses.replace(late, ranks=tuple(stopped) or late.ranks, stopped=late.stopped or bool(stopped))
                )
        return next_action(
            self._happened,
            self._at_first,
            time.monotonic() - self._last,
            policy=self._policy,
            survives=self._replaceable,
        )

    def _now(self) -> list[WorkerEvent]:
        """Returns what happened since the last change."""
        since = max((at for at, h in enumerate(self._happened, 1) if isinstance(h, WorkersChanged)), default=0)
        return self._happened[since:]

    # A change of who is in the run (see comm/membership.py for its order)

    def open_change(self, lost: Collection[int]) -> UnresponsiveDetector:
        """Opens a change of the membership: these ranks are lost and killed, and all others have to answer."""
        assert self._members is not None
        assert self.watch is not None
        for rank in lost:
            self._processes[self._seats[rank]].kill()  # it may only be stopped, and write again one day
        self._members.open_change()
        return self.watch.silence()

    def settled(self, lost: Collection[int], silence: UnresponsiveDetector) -> bool:
        """Tells whether the lost have been waited for, and all others have answered or ended. A rank that does not
        answer is ended. Raises WorkerFailed where a killed process has not ended within KILL_SECONDS."""
        assert self._members is not None
        listened = {self._seats.index(seat) for seat in self._listened()}
        asked = [rank for rank in listened.difference(lost) if not self._members.acknowledged(self._seats[rank])]
        late = silence.broken_by(asked, time.monotonic()) if asked else None
        if late is not None:
            self._note(late)
            for rank in late.ranks:
                self._processes[self._seats[rank]].kill()
        undead = listened.intersection(lost)
        for rank in undead:  # also who was found to be lost since the change was opened
            self._processes[self._seats[rank]].kill()
        if undead and time.monotonic() - self._last > KILL_SECONDS:
            raise WorkerFailed(
                f"rank {min(undead)} was killed, and has not ended within {KILL_SECONDS:.0f} s: it waits for a "
                "device, or the process that it was forked from is stopped"
            )
        return not asked and not undead

    def replace(self, losses: Sequence[WorkerLost]) -> None:
        """Seats new workers in the places of the lost ones, and closes the change."""
        assert self._members is not None
        self._changed(losses)
        for loss in losses:
            seat = self._seats[loss.rank]
            self._leave(seat)
            process = self._launcher.replace(self._payload, seat, self._places, self._port, self.spare)
            self._seat(seat, process)
        self._members.close_change(self._seats)
        if self._stopping:
            self.send({"kind": "stop"}, [loss.rank for loss in losses])

    def prepare_spare(self) -> None:
        """Starts the spare that replacements are forked from."""
        self.spare = self._launcher.spare(self._payload)

    def shrink(self, losses: Sequence[WorkerLost]) -> None:
        """Closes the change without the lost workers."""
        assert self._members is not None
        self._without([loss.rank for loss in losses])
        self._changed(losses)
        self._members.close_change(self._seats)

    def dismiss(self) -> None:
        """Closes the change for the workers that are left, which are to save and to leave."""
        assert self._members is not None
        listened = set(self._listened())
        self._without([rank for rank, seat in enumerate(self._seats) if seat not in listened])
        self._members.close_change(self._seats, ending=True)

    def _without(self, lost: Collection[int]) -> None:
        gone = [self._seats[rank] for rank in lost]
        for seat in gone:
            self._leave(seat)
        self._seats = [seat for seat in self._seats if seat not in gone]
        self.ranks = len(self._seats)

    def restart(self, losses: Sequence[WorkerLost]) -> None:
        """Ends every process, and begins again with others and with memory of their own."""
        self._end_processes()
        self._members = None
        self.watch = None
        self._memory.close()
        self._memory = SharedMemoryOwner()
        self._changed(losses, restarted=True)
        assert isinstance(self._job, Job), "what only measures has no workers that are replaced"
        run_dir = self._job.run_dir
        if self._begun and run_dir is not None and RunDirectory(run_dir).steps():  # not those of another run
            self._payload = cloudpickle.dumps(dataclasses.replace(self._job, resume=True))
        self._begun = False
        self._start()
        if self._stopping:
            self.send({"kind": "stop"})

    def _changed(self, losses: Sequence[WorkerLost], *, restarted: bool = False) -> None:
        self._note(WorkersChanged(tuple(losses), self.ranks, restarted))
        self._kills = memory_kills()
        if self.watch is not None:
            self.watch.sit(self._seats)

    def _leave(self, seat: int) -> None:
        """Closes the lost process's channel, and clears its seat for another one."""
        self._lines.pop(seat).close()
        if self.watch is not None:
            self.watch.reset(seat)

    # Asking all ranks

    def ask(self, order: Mapping[str, Any], kind: str, seconds: float) -> list[Message]:
        """Sends an order to all ranks and returns their answers of this kind, by rank. Raises WorkerFailed where one
        fails instead."""
        self.send(order)
        return self.answers(kind, seconds)

    def answers(self, kind: str, seconds: float) -> list[Message]:
        """Returns one message of this kind from every rank, by rank. Raises as ``ask`` does."""
        given: dict[int, Message] = {}
        allowed = Allowance(seconds)
        while len(given) < self.ranks:
            for rank, message in self.hear(min(LOOK_SECONDS, allowed.left)):
                if message["kind"] == kind:
                    given[rank] = message
            action = self.action()
            if isinstance(action, Stop):
                raise failure(action)
            if allowed.left < 0 and len(given) < self.ranks:
                missing = ", ".join(str(r) for r in range(self.ranks) if r not in given)
                raise WorkerFailed(f"rank {missing} did not answer within {seconds:.0f} s")
        return [given[rank] for rank in range(self.ranks)]

    # Ending

    def part(self, seconds: float = GONE_SECONDS) -> Iterator[tuple[int, Message]]:
        """Yields what ranks that are done still say, until they have ended by themselves or the time is up."""
        allowed = Allowance(seconds)
        while self._listened() and (left := allowed.left) > 0:
            yield from self.hear(min(LOOK_SECONDS, left))

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(GONE_SECONDS)
        for seat in self._listened():
            self._selector.unregister(self._processes[seat].channel)
        for lines in self._lines.values():
            lines.close()
        self._processes, self._lines, self._store = {}, {}, None

    def close(self) -> None:
        """End every process, wait until they are gone, and let go of what they shared."""
        if self.spare is not None:
            self.spare.close()
        self._end_processes()
        self._selector.close()
        for end in (self._awake, self._wake):
            end.close()
        self.watch = self._members = None  # they map the memory
        self._memory.close()


def failure(stop: Stop) -> Exception:
    """Returns the exception that a decision to stop is raised as: the user's mistake, or what could not be done."""
    if stop.mistake:
        return ValueError(stop.cause)
    if stop.checkpoint:
        return CheckpointError(stop.cause)
    if stop.not_finite:
        return NotFinite(stop.cause, rank=stop.rank)
    if stop.differs:
        return RanksDiffer(stop.cause)
    return WorkerFailed(stop.cause, rank=stop.rank, traceback=stop.traceback, where=stop.where)


def _meeting_place() -> Any:
    """Returns the store where the ranks find each other, reachable from this host alone."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
