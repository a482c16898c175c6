"""The queue that hands out batches to workers: each batch is handed out once, and comes back where its worker dies
before its gradient is pushed.

A worker's line says how many batches it has taken and how many of them are in the weights; a batch that it takes is
written into its log before the next one is handed out. Everything is changed under one lock that survives its holder's
death, or by the worker alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from apportion.comm.sync import CommitWord, sleep_on, wake
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.store_memory import StoreMemory
from apportion.parallel.parameter_store.memory.store_spec import PUSH, TICKET, VERSIONS

WAIT_SECONDS = 300.0
LOOK_SECONDS = 0.01


@final
class BatchQueue:
    """One worker's access to the queue of batches. ``check()`` raises where waiting has become pointless."""

    def __init__(self, memory: StoreMemory, worker: int, check: Callable[[], None]) -> None:
        self._memory, self._worker, self._check = memory, worker, check
        self._line = memory.lines[worker]
        self._taken = self._line.word("taken")
        self._turn = CommitWord(memory.turn)
        self._capacity = memory.extent.capacity
        self.waited = 0.0
        self.waiting: Callable[[], Any] = lambda: None
        """Returns one word of memory that is 1 while this worker waits for others, so that a supervisor can find the
        worker that is late; None where nothing watches."""

    # Batches

    def take_batch(self, total: int) -> int | None:
        """Take the next batch that no worker has taken, or one that came back from a dead worker; None: all are handed
        out."""
        m = self._memory
        with self.locked():
            back = m.head.returned
            ticket = int(m.returned[back - 1]) if back else m.head.handed_out
            if ticket >= total:
                self._line.ended = 1
                return None
            # The batch is in the log before it leaves the queue. A death in between leaves it in both, which _repair()
            # sees; the other order could leave it in neither, and the batch would be lost.
            self.record_taken(ticket)
            if back:
                m.head.returned = back - 1
            else:
                m.head.handed_out = ticket + 1
            return ticket

    def record_taken(self, ticket: int) -> None:
        """Write down that this worker has taken a batch."""
        line = self._line
        entry = self._memory.log.entries[self._worker, line.taken % self._capacity]
        entry[TICKET], entry[PUSH] = ticket, line.pushes + 1
        # The entry is written before the count that makes it valid: a process that dies in between has taken nothing.
        self._taken.publish(line.taken + 1)
        line.ended = 0

    def record_versions(self, pulled: Sequence[int] | None) -> None:
        """Write down the versions that the gradient of the batch taken last is computed on; None: on the weights that
        the batch before it left."""
        entry = self._memory.log.entries[self._worker, (self._line.taken - 1) % self._capacity]
        if pulled is None:
            entry[VERSIONS] = -1
        else:
            entry[VERSIONS:] = pulled

    def count_pushed(self) -> None:
        """Count the batches that this worker has taken as being in the weights, where the worker has put them there
        itself."""
        line = self._line
        line.entries = line.taken
        line.pushes += 1

    def stop_taking(self) -> None:
        """Declare that this worker takes no more batches for now, so that no worker waits for it."""
        self._line.ended = 1
        self.wake_all()

    def taken_batches(self, worker: int) -> list[int]:
        """Return the batches that a worker has taken and not pushed."""
        m, line = self._memory, self._memory.lines[worker]
        return [int(m.log.entries[worker, entry % self._capacity, TICKET]) for entry in range(line.entries, line.taken)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the queue: no worker takes a batch or begins a push meanwhile."""
        self._lock()
        try:
            yield
        finally:
            self._memory.queue_lock.release()

    def progress(self) -> tuple[int, list[int]]:
        """Return how many batches are in the weights, and the batches that were handed out and are not. Called while
        the queue is held."""
        m = self._memory
        unpushed = sorted({*m.returned[: m.head.returned].tolist(), *self._all_taken()})
        return m.head.handed_out - len(unpushed), unpushed

    def unpushed(self) -> list[int]:
        """Return the batches that were handed out and are not in the weights."""
        with self.locked():
            return self.progress()[1]

    def _all_taken(self) -> set[int]:
        return {ticket for worker in range(self._memory.extent.workers) for ticket in self.taken_batches(worker)}

    # After a death

    def give_back(self, worker: int) -> None:
        """Put the batches that a worker has taken and not pushed back into the queue."""
        m, line = self._memory, self._memory.lines[worker]
        with self.locked():
            back, tickets = m.head.returned, self.taken_batches(worker)
            m.returned[back : back + len(tickets)] = tickets
            m.head.returned = back + len(tickets)
            # The batches are in the queue before the worker's count forgets them. A death in between leaves them in
            # both, and the heir of the lock removes from the queue what a worker has.
            line.word("taken").publish(line.entries)
            line.ended = 1
        self.wake_all()  # a worker that was too far ahead of this one may go on

    def _lock(self) -> None:
        # A lock whose holder is dead is handed to the next process, marked as orphaned: what it guards may be half
        # changed.
        failed = self._memory.queue_lock.wait(self._check)
        if failed and self._memory.queue_lock.is_orphan(failed):
            self._repair()

    def _repair(self) -> None:
        """Repair the queue after a worker died while it took a batch: a batch that a worker has taken is not to be
        handed out again."""
        m, taken = self._memory, self._all_taken()
        left = [t for t in m.returned[: m.head.returned].tolist() if t not in taken]
        m.returned[: len(left)] = left
        m.head.returned = len(left)
        # The dead worker may have written its log and not the head: the batch that it took is not handed out twice.
        m.head.handed_out = max([m.head.handed_out, *(t + 1 for t in taken)])
        m.queue_lock.adopt()

    # Waiting for others

    def wait_until(self, until: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until ``until()`` is true; ``what()`` says what is waited for. PeerLost where that takes too long and no
        supervisor watches."""
        if until():
            return
        turn, began = self._memory.turn, time.perf_counter()
        waiting = self.waiting()
        if waiting is not None:
            waiting[0] = 1
        try:
            while True:
                # The word is read before the condition. A change in between has changed the word, and sleep_on()
                # returns at once: no wake-up is lost. The timeout only bounds how late a death is noticed.
                seen = turn.value
                if until():
                    break
                self._check()
                if waiting is None and time.perf_counter() - began > WAIT_SECONDS:
                    raise PeerLost(f"a worker has waited {WAIT_SECONDS:.0f} s for {what()}")
                sleep_on(turn, seen, LOOK_SECONDS)
        finally:
            if waiting is not None:
                waiting[0] = 0
        self.waited += time.perf_counter() - began

    def sleep_until_woken(self) -> None:
        """Sleep until another process calls ``tell``, or for a moment; raises where waiting has become pointless."""
        self._check()
        # The word is read after the caller has looked, so that a wake-up in between is lost: the timeout bounds how
        # much later the caller looks again.
        sleep_on(self._memory.turn, self._memory.turn.value, LOOK_SECONDS)

    def wake_all(self) -> None:
        """Wake every process that waits, so that it looks again."""
        turn = self._memory.turn
        # No lock: two processes that add at once may write the same number. What a sleeper then misses, it finds after
        # LOOK_SECONDS.
        self._turn.publish((turn.value + 1) & 0x7FFFFFFF)
        wake(turn)

    def pushes_ahead(self, workers: Sequence[int]) -> int:
        """Return by how many pushes this worker is ahead of the slowest of those that still take batches."""
        lines = self._memory.lines
        going = [lines[worker].pushes for worker in workers if not lines[worker].ended]
        return self._line.pushes - min(going, default=self._line.pushes)

    def begin_rounds(self) -> None:
        """Write down, in ordered mode, that this worker has pulled for no round yet."""
        self._line.round = 0

    def enter_round(self, number: int) -> None:
        """Write down, in ordered mode, that this worker has pulled the weights that the round beginning with this batch
        is computed on."""
        self._line.round = number + 1
        self.wake_all()

    def all_entered(self, workers: Sequence[int]) -> bool:
        """Return whether all of these workers have pulled for the round that this one is in. A push before that would
        change the weights that they pull."""
        own = self._line.round
        return all(self._memory.lines[worker].round >= own for worker in workers)
