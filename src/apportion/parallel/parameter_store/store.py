"""The store itself: weights and slots in shards, which workers push gradients to and pull weights from.

::

    worker 0  gradient --push--> shard 0 | shard 1 | shard 2 | ...   each: a lock, a version, weights, slots
    worker 1  weights  <--pull--

A push visits the shards one by one, or a few free ones at a time, and holds their locks while it computes; a pull holds
them while it copies. What a push is made of lies in shared memory before it begins, so another process ends what a dead
one has begun: every push gets into all shards, exactly once (``push.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from apportion.comm.sync import sleep_on
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.batch_queue import LOOK_SECONDS, BatchQueue
from apportion.parallel.parameter_store.memory.store_memory import Array, StoreMemory
from apportion.parallel.parameter_store.memory.store_spec import StoreSpec
from apportion.parallel.parameter_store.push import ShardApplier, StagedPush
from apportion.parallel.parameter_store.push_store import Contents as Contents
from apportion.parallel.parameter_store.push_store import PushStore

ALL_USED = 2
READY_SECONDS = 120.0
STILL_SECONDS = 0.0002
"""The seconds between two looks at whether a push that was begun has come to its end."""


@dataclass(frozen=True)
class Snapshot:
    """A store's contents at one moment. ``done`` updates are in them; the batches ``unpushed`` were handed out and are
    not."""

    done: int
    unpushed: list[int]
    contents: Contents


class Servers(Protocol):
    """The processes that hold the shards, as a worker sees them (``parallel/parameter_store/protocol.py``)."""

    def apply(self, push: StagedPush) -> list[int] | None:
        """Have the push applied to every shard. Where it pulls, the new weights are copied out; returns their versions,
        None where it does not."""

    def close(self) -> None:
        """Close all connections to the servers."""


class Store(PushStore):
    """One worker's view of the store, as that worker; or a ``server``'s, which does what that worker asks. ``check()``
    raises where waiting has become pointless."""

    def __init__(
        self,
        extent: StoreSpec,
        memory: memoryview,
        *,
        worker: int = 0,
        server: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.extent, self.layout, self.rule = extent, extent.layout, extent.layout.rule
        self.worker, self._check = worker, check
        self.memory = m = StoreMemory(extent, memory)
        self.queue: BatchQueue = BatchQueue(m, worker, check)
        self._line = m.lines[worker]
        self.gradient = m.workers.gradients[worker]
        """The gradient that the next push brings: flat, filled by the caller."""
        self.change = m.workers.changes[worker]
        """The change of each buffer that the next push brings: flat, filled by the caller."""
        self.weights = m.workers.own[worker]
        """The weights that were pulled, as a flat vector."""
        self.buffers = torch.zeros(extent.buffers, dtype=torch.float64)
        self.pulled: Sequence[int] = [0] * extent.shards
        """The version of each shard in ``weights``."""
        self.servers: Servers | None = None
        """The servers that apply pushes; None: this process does it itself."""
        self.applier = ShardApplier(m, worker, server, check)
        first = worker * self.layout.shards // extent.workers
        every = list(range(self.layout.shards))
        self._tour = [*every[first:], *every[:first], *range(self.layout.shards, extent.shards)]
        self._hyper: Sequence[Sequence[float]] | None = None

    @property
    def waited(self) -> float:
        """The seconds spent waiting for shards and for other workers."""
        return self.applier.waited + self.queue.waited

    # The beginning

    def settle(self, start: Callable[[], None], *, first: bool) -> None:
        """Make the locks and fill the store in by ``start()``, where this is the ``first``; or wait until that is done.
        PeerLost where it takes too long."""
        m = self.memory
        if first and not m.ready.read():
            # The locks come before the word `ready`: another process maps them once it reads that word, and not before.
            m.make_locks()
            self.applier.open_locks()
            start()
            m.ready.publish(1)
            self.queue.wake_all()
        deadline = time.monotonic() + READY_SECONDS
        while True:
            seen = m.turn.value
            if m.ready.read():
                break
            self._check()
            sleep_on(m.turn, seen, LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise PeerLost(f"rank 0 has not filled the parameter store within {READY_SECONDS:.0f} s")
        if not self.applier.is_open:
            self.applier.open_locks()

    def put(self, contents: Contents, *, done: int, unpushed: Sequence[int] = ()) -> None:
        """Replace what the store holds by these contents, which have ``done`` updates behind them. The batches
        ``unpushed`` were handed out before and are not in the contents: they come first. Called while no worker
        pushes."""
        m = self.memory
        for shard in range(self.extent.shards):
            copy = m.shards.live(shard)
            if shard < self.layout.shards:
                a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
                for into, flat in zip((m.shards.weights, *m.shards.slots[copy]), contents.data, strict=True):
                    into[a:b] = flat[a:b]
                m.shards.counts[copy][shard][:] = contents.counts[shard]
            else:
                m.shards.buffers[copy] = contents.buffers
        m.shards.touched[:] = contents.touched
        m.head.base = done - self._pushed()
        m.head.handed_out = done + len(unpushed)
        m.returned[: len(unpushed)] = unpushed
        m.head.returned = len(unpushed)

    # What workers do

    @property
    def done(self) -> int:
        """The number of batches whose gradient is in the weights."""
        return self.memory.head.base + self._pushed()

    def _pushed(self) -> int:
        return sum(line.entries for line in self.memory.lines)

    @property
    def pushes(self) -> int:
        """The number of pushes made by all workers."""
        return sum(line.pushes for line in self.memory.lines)

    def pull(self) -> None:
        """Copy the last version of every shard into ``weights`` (and of the buffers into ``buffers``)."""
        self.pulled = self.copy_out(0, self.extent.shards)

    def copy_out(self, first: int, last: int) -> list[int]:
        """Copy the last version of these shards into ``weights`` (and of the buffers into ``buffers``); returns their
        versions."""
        m, at, found = self.memory, first, list[int]()
        end = min(last, self.layout.shards)
        while at < end:
            count = self.applier.lock_run(at, end) if m.shards.copies > 1 else end - at
            found += [m.shards.versions[shard].value for shard in range(at, at + count)]
            a, b = self.layout.bounds[at], self.layout.bounds[at + count]
            self.weights[a:b].copy_(m.shards.weights[a:b])
            if m.shards.copies > 1:
                self.applier.release(at, count)
            at += count
        if last > self.layout.shards:
            found.append(self._copy_buffers())
        return found

    def _copy_buffers(self) -> int:
        m, shard = self.memory, self.layout.shards
        self.applier.lock(shard)
        try:
            self.buffers.copy_(m.shards.buffers[m.shards.live(shard)])
            return m.shards.versions[shard].value
        finally:
            self.applier.release(shard)

    def push(self, hyper: Sequence[Sequence[float]], *, used: Sequence[bool] | None = None, pull: bool = True) -> float:
        """Update every shard with ``gradient`` (and the buffers with ``change``), by these hyperparameters of each
        group; ``used``: which parameters have a gradient (None: all). ``pull``: the updated weights are pulled on the
        way. Returns the staleness: pushes of others to a shard since it was pulled, the mean over the shards."""
        push, found = self._begin_push(hyper, used, pull), None
        if self.servers is not None:
            found = self.servers.apply(push)
        else:
            self.apply(push, list(self._tour))
        self._end(self.worker)
        shards, row = self.memory.extent.shards, self.memory.log.row(self.worker, push.number)
        made = self.memory.log.made[row : row + shards]
        stale = sum(made) - sum(self.pulled) - shards
        if pull:
            self.pulled = made if found is None else found
        return stale / shards

    def _begin_push(self, hyper: Sequence[Sequence[float]], used: Sequence[bool] | None, pull: bool) -> StagedPush:
        """Write down in memory everything that the push is made of: from here on it gets into all shards, even where a
        process dies."""
        m, line = self.memory, self._line
        if hyper is not self._hyper:
            self._hyper = hyper
            for row, values in zip(m.workers.hyper[self.worker], hyper, strict=True):
                row[:] = values
        self._mark_used(used)
        number = line.pushes + 1
        m.log.made_rows[self.worker, number % m.log.capacity] = 0
        line.entries_then = line.taken
        # Everything that the push is made of lies in memory before this word says that there is one. It is written
        # under the lock of the queue, which a snapshot holds: so no push begins while a snapshot reads.
        with self.queue.locked():  # a snapshot ends first
            line.pushing = number
        # With servers, one that was asked before another was lost may still be at it.
        return StagedPush(self.worker, number, hyper, used, pull, unsure=self.extent.servers > 0)

    def _mark_used(self, used: Sequence[bool] | None) -> None:
        m = self.memory
        if used is None:
            m.workers.used[self.worker, 0] = ALL_USED
            m.shards.touched[:] = 1
        else:
            m.workers.used[self.worker] = used
            m.shards.touched[np.asarray(used, dtype=bool)] = 1

    def _end(self, worker: int) -> None:
        """Record that every shard has the push that the worker had begun."""
        line = self.memory.lines[worker]
        # The word `pushing` is cleared last. A process that dies before leaves a push that another one finds in every
        # shard and ends again, which sets the same two numbers to the same values.
        line.entries = line.entries_then
        line.pushes = line.pushing
        self.memory.pushing[worker].publish(0)

    def apply(self, push: StagedPush, left: list[int]) -> None:
        """Apply a push to these shards."""
        self.applier.apply(push, left, self.buffers)

    @property
    def still(self) -> bool:
        """Tells whether no worker is in the middle of a push."""
        return not any(line.pushing for line in self.memory.lines)

    # After a death

    def finish(self, worker: int) -> None:
        """End what the process of that worker had begun and cannot end: its push gets into the rest of the shards; the
        batches that it had taken and not pushed go back into the queue."""
        # The push comes first: its batches count as pushed from then on, and are not given back with the others.
        self.finish_push(worker)
        self.queue.give_back(worker)

    def finish_push(self, worker: int) -> bool:
        """End the push that the process of that worker had begun; returns whether there was one."""
        self.applier.resolve(worker)
        push = self.under_way(worker)
        if push is None:
            return False
        if worker == self.worker:
            self._hyper = None
        # The heir asks each shard whether it has the push, by its log and version. The same push may be ended by a
        # server that is still alive, so apply() asks again under each lock (`unsure`).
        self.apply(push, [shard for shard in self._tour if not self.applier.has_push(shard, push)])
        self._end(worker)
        return True

    def under_way(self, worker: int, *, pull: bool = False) -> StagedPush | None:
        """Return the push that a worker has begun, as it is written down; None where there is none."""
        m, number = self.memory, self.memory.lines[worker].pushing
        if not number:
            return None
        used = None if m.workers.used[worker, 0] == ALL_USED else [bool(u) for u in m.workers.used[worker]]
        return StagedPush(worker, number, m.workers.hyper[worker].tolist(), used, pull, unsure=True)

    # The whole

    @property
    def nbytes(self) -> int:
        """The bytes of the weights, slots and buffers that all workers have in common."""
        m = self.memory
        return m.shards.weights.nbytes + m.shards.slots.nbytes + m.shards.buffers.nbytes

    def snapshot(self, check: Callable[[], None], seconds: float) -> Snapshot:
        """Read the store as it is at one moment: every batch is in the weights whole, or listed as unpushed.
        ``check()`` raises where waiting has become pointless; PeerLost is raised where a push that was begun does not
        come to its end within ``seconds``."""
        deadline = time.monotonic() + seconds
        with self.queue.locked():
            # The lock of the queue is held, so that no push begins; those under way end without that lock. So the wait
            # is bounded by the longest push, unless its process is dead or stopped.
            while not self.still:
                check()
                if time.monotonic() > deadline:
                    raise PeerLost(f"a push to the parameter store took more than {seconds:g} s: is a worker stopped?")
                time.sleep(STILL_SECONDS)
            return Snapshot(self.done, self.queue.progress()[1], self.read())

    def read(self) -> Contents:
        """Return copies of everything that the store holds; each shard as one push has left it."""
        m = self.memory
        data = m.shards.weights.new_empty(1 + m.shards.slots.shape[1], self.layout.total)
        counts: list[Array] = []
        buffers = torch.zeros(self.extent.buffers, dtype=torch.float64)
        for shard in range(self.extent.shards):
            self.applier.lock(shard)
            try:
                copy = m.shards.live(shard)
                if shard == self.layout.shards:
                    buffers.copy_(m.shards.buffers[copy])
                    continue
                a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
                data[0, a:b].copy_(m.shards.weights[a:b])
                data[1:, a:b].copy_(m.shards.slots[copy, :, a:b])
                counts.append(m.shards.counts[copy][shard].copy())
            finally:
                self.applier.release(shard)
        return Contents(list(data.unbind(0)), counts, m.shards.touched.astype(bool), buffers)
