"""The workers of a run on this host, seen from the driver: starts, hears, watches, replaces and ends their
processes."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import cloudpickle

from apportion.comm.channel import Lines, Message, SharedMemoryOwner
from apportion.comm.membership import Membership
from apportion.core.policy import Policy
from apportion.errors import WorkerFailed
from apportion.process import is_stopped
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.launch.local import Local, Process
from apportion.runtime.spawn.stacks import tell_to_print_stacks
from apportion.runtime.spawn.template import Spare
from apportion.runtime.supervisor.failures import (
    Action,
    Notice,
    Stop,
    WorkerFinished,
    WorkerLost,
    WorkerRaised,
    failure,
)
from apportion.runtime.supervisor.rank_pool import KILL_SECONDS, OpenChange, PoolHistory, RankPool
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Allowance, Watchdog
from apportion.runtime.worker import progress
from apportion.runtime.worker.job import Job, WorkerJob


class WorkerPool(RankPool):
    """Worker processes that run ``target`` (``module:function``) on a job, one for each rank. ``importer``: the spare
    that they are forked from, where it can fork; it belongs to the caller."""

    def __init__(self, launcher: Local, target: str, job: WorkerJob, ranks: int, importer: Spare | None = None) -> None:
        policy, replaceable = (job.policy, job.replaceable) if isinstance(job, Job) else (Policy(), False)
        super().__init__(PoolHistory(ranks, policy, survives=replaceable), replaceable=replaceable)
        self._launcher, self._target, self._job, self._payload = launcher, target, job, cloudpickle.dumps(job)
        self._imports = job.strategy.imports if isinstance(job, Job) and ranks > 1 else ()
        self._ranks = ranks
        self._channels = WorkerChannels()
        self._shared: SharedResources | None = None
        try:
            self._start(importer)
        except BaseException:
            self.close()
            raise

    def _start(self, importer: Spare | None = None) -> None:
        self._places, self._channels.slots = self.ranks, list(range(self.ranks))
        """The number of slots."""
        port = self.renew()
        if self._imports:
            self._launcher.import_ahead(self._imports)
        given = self._target, self._payload, self.ranks, port
        own = importer is None or type(self._launcher) is not Local  # another launcher starts ranks in its own way
        started = self._launcher.start(*given) if own else self._launcher.start_from(importer, *given)
        for slot, process in enumerate(started):
            self._channels.add(slot, process)

    def renew(self) -> int:
        """Makes memory for the ranks that nothing has used yet, in place of any other, and a store where they need one;
        returns its port."""
        self.release()
        on_cpu = self._launcher.on_cpu()
        self._shared = SharedResources(self.ranks, replaceable=self._replaceable, on_cpu=on_cpu)
        return self._shared.port

    def release(self) -> None:
        """Lets go of the memory and the store of the ranks, none of which uses them any more."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    # From any thread

    def pids(self) -> list[int]:
        """Returns the process ids by rank; none while all are started again."""
        return self._channels.pids()

    def wake(self) -> None:
        """Makes ``hear`` return now."""
        self._channels.wake()

    def _send(self, order: Mapping[str, Any], ranks: Sequence[int] | None) -> None:
        self._channels.send(order, ranks)

    # What happens

    def hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields what ranks report within this time, and returns after the first reports. What happens to the ranks is
        noted."""
        if self._shared is not None and self._shared.members is not None:
            self._shared.members.tick()
        for slot, messages in self._channels.receive(seconds):
            # In this order: the exit status is there only once the process is reaped, and only then is the rank lost.
            # Its slot stays taken until a change of the membership clears it, so that ranks keep their numbers.
            if messages is None:
                code = self._channels.reap(slot)
                self.history.add_exit(self._channels.rank_of(slot), code, self._seen_by(slot))
                continue
            for message in messages:
                # Requests for memory are answered here, at once: a worker cannot go on without.
                if message["kind"] == "shared":
                    self._hand_out(slot, message)
                elif message["kind"] in ("raised", "finished"):
                    self._note_message(slot, message)
                else:
                    yield self._channels.rank_of(slot), self._channels.with_run_seconds(slot, message)

    def _hand_out(self, slot: int, asked: Message) -> None:
        assert self._shared is not None
        reply = {"kind": "shared", "name": asked["name"]}
        try:
            given = [self._shared.memory.fd(asked["name"], asked["nbytes"])]
        except OSError as error:
            given, reply = [], {**reply, "refused": error.strerror or str(error)}
        self._channels.reply(slot, reply, *given)

    def _note_message(self, slot: int, message: Message) -> None:
        rank = self._channels.rank_of(slot)
        if message.pop("kind") == "finished":
            self.history.add(WorkerFinished(rank))
        else:
            self.history.add(WorkerRaised(rank, **message, step=self._seen_by(slot)))

    @property
    def ranks(self) -> int:
        """The number of ranks that are in the run."""
        return self._ranks

    @property
    def step(self) -> int:
        """The number of updates made, as far as the ranks show it."""
        return self._shared.watch.step if self._shared is not None else 0

    def _seen_by(self, slot: int) -> int:
        """Returns the updates that the worker in this slot had seen made: its own count, where each worker trains on
        its own."""
        return self._shared.watch.step_of(slot) if self._shared is not None else 0

    def action(self) -> Action:
        """Decides what to do about all that has happened so far."""
        if self._shared is not None:
            watch = self._shared.watch
            self._note_begun(watch)
            stopped = [rank for rank, pid in enumerate(self.pids()) if is_stopped(pid)]
            # Ranks that have finished stand still from then on, while others may still go on: they are excused.
            late = watch.late(time.monotonic(), stopped, self.history.finished)
            if late is not None and self.history.add_late(late, stopped):
                tell_to_print_stacks(self.pids())
        return self.history.action()

    # A change of who is in the run

    def open_change(self, lost: Collection[int]) -> MembershipChange:
        """Opens a change of the membership: these ranks are lost and killed, and all others have to answer."""
        assert self._shared is not None
        assert self._shared.members is not None
        self._channels.kill(lost)  # one may only be stopped, and write again one day
        return MembershipChange(self._channels, self._shared.members, self._shared.watch, self.history)

    def admit(self) -> MembershipChange:
        """Opens a change in which no rank is lost."""
        return self.open_change([])

    def grow(self) -> None:
        """Closes a change in which no rank was lost."""
        self._changed([])
        self._close_change()

    def notices(self) -> list[Notice]:
        """Returns what the user is to know, since the last call, of ranks that stand still while others go on."""
        notices = self._shared.watch.notices() if self._shared is not None else []
        pids = self.pids()
        tell_to_print_stacks(pids[notice.rank] for notice in notices if notice.rank < len(pids))
        return notices

    def replace(self, losses: Sequence[WorkerLost]) -> list[WorkerLost]:
        """Puts new workers in the places of the lost ones, and closes the change. Returns the losses in whose places
        there are none: none of them."""
        assert self._shared is not None
        # The history first: what happens from here on happens to the ranks of the new world, and an exit of a new
        # worker must not be counted among those of the old one.
        self._changed(losses)
        for loss in losses:
            slot = self._channels.slots[loss.rank]
            # The marks of the lost one are cleared before its successor starts: it would otherwise be taken for a rank
            # that waits, or that has begun, until it has written its own.
            self._channels.clear(slot)
            self._shared.watch.reset(slot)
            port = self._shared.port
            self._channels.add(slot, self._launcher.replace(self._payload, slot, self._places, port, self.spare))
        # The order was sent before these workers existed.
        self._close_change()
        if self._stopping:
            self.send({"kind": "stop"}, [loss.rank for loss in losses])
        return []

    def prepare_spare(self) -> None:
        """Starts the spare that replacements are forked from."""
        self.spare = self._launcher.spare(self._payload)

    def shrink(self, losses: Sequence[WorkerLost]) -> None:
        """Closes the change without the lost workers."""
        self._without([self._channels.slots[loss.rank] for loss in losses])
        self._changed(losses)
        self._close_change()

    def dismiss(self) -> None:
        """Closes the change for the workers that are left, which are to save and to leave."""
        listened = set(self._channels.open_slots())
        self._without([slot for slot in self._channels.slots if slot not in listened])
        self._close_change(ending=True)

    def _close_change(self, *, ending: bool = False) -> None:
        assert self._shared is not None
        assert self._shared.members is not None
        self._shared.members.close_change(self._channels.slots, ending=ending)

    def _without(self, gone: Collection[int]) -> None:
        assert self._shared is not None
        self._channels.remove(gone)
        for slot in gone:
            self._shared.watch.reset(slot)
        self._ranks = len(self._channels.slots)

    def restart(self, losses: Sequence[WorkerLost]) -> Iterator[tuple[int, Message]]:
        """Ends every process, and begins again with others and with memory of their own. What ranks still say is not
        waited for."""
        # In this order: workers use the memory and the store until they have ended. The new ones get memory of their
        # own, which a process that was killed and has not ended yet cannot reach.
        self._channels.end_all()
        self.release()
        self._changed(losses, restarted=True)
        assert isinstance(self._job, Job), "what only measures has no workers that are replaced"
        run_dir = self._job.run_dir
        if self._begun and run_dir is not None and RunDirectory(run_dir).steps():  # not those of another run
            self._payload = cloudpickle.dumps(dataclasses.replace(self._job, resume=True))
        self._begun = False
        self._start()
        if self._stopping:
            self.send({"kind": "stop"})
        return iter(())

    def _changed(self, losses: Sequence[WorkerLost], *, restarted: bool = False) -> None:
        self.history.add_change(losses, self.ranks, restarted=restarted)
        if self._shared is not None:
            self._shared.watch.assign_slots(self._channels.slots)

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

    def _may_report(self) -> bool:
        return bool(self._channels.open_slots())

    def close(self) -> None:
        """Ends every process, waits until they are gone, and lets go of what they shared."""
        if self.spare is not None:
            self.spare.close()
        self._channels.close()
        self.release()


@final
class SharedResources:
    """What the workers of one start share, which the driver holds for them: memory, and a store where ranks with GPUs
    find each other. ``replaceable``: whether there is a page of the membership, since workers may be replaced;
    ``on_cpu``: the ranks exchange through memory alone, and need no store."""

    def __init__(self, ranks: int, *, replaceable: bool, on_cpu: bool) -> None:
        self.memory = SharedMemoryOwner()
        try:
            self.watch = Watchdog(progress.lines(self.memory.map("progress", progress.NBYTES * ranks)))
            self.members: Membership | None = None
            if replaceable:
                page = memoryview(self.memory.map("members", Membership.nbytes(ranks)))
                self.members = Membership(page, ranks)
                self.members.begin()
            self._store = _open_store() if ranks > 1 and not on_cpu else None
        except BaseException:
            self.memory.close()
            raise
        self.port = self._store.port if self._store is not None else 0
        """The port of the store; 0 where there is none."""

    def close(self) -> None:
        """Lets go of the memory, which ranks that map it keep; nothing else may hold this object any more."""
        self.memory.close()


def _open_store() -> Any:
    """Returns a store that is reachable from this host alone."""
    import torch.distributed as dist  # what computes on the CPU needs none

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


@final
class MembershipChange(OpenChange):
    """An open change of the membership, until its table can be written (``comm/membership.py``): the lost are killed,
    and all others have to answer."""

    def __init__(self, channels: WorkerChannels, members: Membership, watch: Watchdog, history: PoolHistory) -> None:
        self._channels, self._members, self._history = channels, members, history
        members.open_change()
        self._silence = watch.silence()

    def settled(self, lost: Collection[int]) -> bool:
        """Tells whether the lost have been waited for, and all others have answered or ended. A rank that does not
        answer is ended. Raises WorkerFailed where a killed process has not ended within KILL_SECONDS."""
        channels = self._channels
        listened = {channels.rank_of(slot) for slot in channels.open_slots()}
        asked = [r for r in listened.difference(lost) if not self._members.acknowledged(channels.slots[r])]
        late = self._silence.broken_by(asked, time.monotonic()) if asked else None
        if late is not None:
            self._history.add(late)
            channels.kill(late.ranks)
        undead = listened.intersection(lost)
        channels.kill(undead)  # also who was found to be lost since the change was opened
        if undead and self._history.quiet > KILL_SECONDS:
            raise WorkerFailed(
                f"rank {min(undead)} was killed, and has not ended within {KILL_SECONDS:.0f} s: it waits for a "
                "device, or the process that it was forked from is stopped"
            )
        return not asked and not undead


# The processes of a worker pool and the channels to them, by slot.
#
# A process that replaces another takes over its slot; its rank is its place among the slots that are taken.


GONE_SECONDS = 5.0
"""The seconds that a process may take to end once it is killed, or has closed its channel."""


@final
class WorkerChannels:
    """The processes of a pool, and what is sent and received. ``pids``, ``send`` and ``wake`` may be called from any
    thread, everything else from the thread that the pool belongs to."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        """The slot of each rank."""
        self._processes: dict[int, Process] = {}
        self._lines: dict[int, Lines] = {}
        self._late_by: dict[int, float] = {}
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._awake, self._wake = socket.socketpair()
        for end in (self._awake, self._wake):
            end.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)

    # From any thread

    def pids(self) -> list[int]:
        """Returns the process ids by rank; none while all are started again."""
        # The pool's thread may put another dictionary and another list in the place of these meanwhile. Each is read
        # once, so that a rank may be missing here, but no process id is that of another rank.
        processes = self._processes
        return [processes[slot].pid for slot in list(self.slots) if slot in processes]

    def wake(self) -> None:
        """Makes ``receive`` return now."""
        try:
            self._wake.send(b".")
        except OSError:
            pass  # it is full, which wakes too; or closed

    def send(self, order: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Sends an order to these ranks (None: to all)."""
        slots = list(self.slots)
        for slot in slots if ranks is None else [slots[rank] for rank in ranks]:
            self.reply(slot, order)

    def reply(self, slot: int, message: Mapping[str, Any], *fds: int) -> None:
        """Sends a message to the process in this slot."""
        try:
            self._lines[slot].send(message, *fds)
        except (OSError, KeyError):
            pass  # it is gone; its exit says so

    # From the thread of the pool

    def add(self, slot: int, process: Process) -> None:
        """Puts a new process into a slot."""
        self._processes[slot], self._lines[slot] = process, Lines(process.channel)
        self._late_by[slot] = time.monotonic() - self._began
        self._selector.register(process.channel, selectors.EVENT_READ, slot)
        # An exit makes the channel readable only where nothing else holds it open, such as a loader that the worker has
        # started: so the end of the process itself wakes `receive` too.
        process.when_ended(self.wake)

    def remove(self, slots: Collection[int]) -> None:
        """Goes on without these slots."""
        for slot in slots:
            self.clear(slot)
        self.slots = [slot for slot in self.slots if slot not in slots]

    def clear(self, slot: int) -> None:
        """Closes the channel of a process that has ended, and clears its slot for another one."""
        self._lines.pop(slot).close()

    def rank_of(self, slot: int) -> int:
        """Returns the rank of the process in this slot."""
        return self.slots.index(slot)

    def kill(self, ranks: Collection[int]) -> None:
        """Kills the processes of these ranks."""
        for rank in ranks:
            self._processes[self.slots[rank]].kill()

    def open_slots(self) -> list[int]:
        """Returns the slots whose processes may still say something."""
        return [key.data for key in (self._selector.get_map() or {}).values() if key.data is not None]

    def receive(self, seconds: float) -> Iterator[tuple[int, list[Message] | None]]:
        """Yields what the processes say within this time, by slot, and returns after the first messages; None: the
        process has nothing more to say, and is to be waited for (``reap``)."""
        # The order matters. A process that had ended before `select`, and whose channel is silent after it, has nothing
        # more to say, even where a process that it has started holds its channel open. Looked at after `select`, it
        # could have written its last words in between, which would be lost.
        ended = {slot for slot in self.open_slots() if self._processes[slot].returncode() is not None}
        ready = self._selector.select(0.0 if ended else max(0.0, seconds))
        for slot in ended - {key.data for key, _ in ready}:
            yield slot, None
        for key, _ in ready:
            if key.data is None:
                self._awake.recv(4096)
            else:
                yield key.data, self._lines[key.data].receive()

    def with_run_seconds(self, slot: int, message: Message) -> Message:
        """Adds the time before its start to the seconds of a replacement's event: it counts from its own start."""
        if message["kind"] == "event" and self._late_by[slot] > 0.0:
            message["event"]["seconds"] += self._late_by[slot]
        return message

    def reap(self, slot: int) -> int:
        """Waits until the process in this slot has ended, kills it where it does not, and returns its exit status."""
        process = self._processes[slot]
        # Unregistered before the wait: a closed channel is readable for ever, and `receive` would return at once again.
        self._selector.unregister(process.channel)
        code = process.wait(GONE_SECONDS)
        if code is None:  # it closed its channel and lives on: it can no longer be led
            process.kill()
            code = process.wait(GONE_SECONDS)
        return code if code is not None else -9

    def end_all(self) -> None:
        """Ends every process, and waits until they are gone."""
        # All are killed before the first is waited for: they end side by side, and none waits for another that is gone.
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(GONE_SECONDS)
        for slot in self.open_slots():
            self._selector.unregister(self._processes[slot].channel)
        for lines in self._lines.values():
            lines.close()
        self._processes, self._lines = {}, {}

    def close(self) -> None:
        """Ends every process, and then listens no more."""
        self.end_all()
        self._selector.close()
        for end in (self._awake, self._wake):
            end.close()
