"""The processes of a worker pool and the channels to them, by slot.

A process that replaces another takes over its slot; its rank is its place among the slots that are taken.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

from apportion.comm.channel import Lines, Message
from apportion.runtime.launch.local import Process

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
