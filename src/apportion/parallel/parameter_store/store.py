"""The store itself: weights and slots in shards, which workers push gradients to and pull weights from.

::

    worker 0  gradient --push--> shard 0 | shard 1 | shard 2 | ...   each: a lock, a version, weights, slots
    worker 1  weights  <--pull--

A push visits the shards one by one, or a few free ones at a time, and holds their locks while it computes; a pull holds
them while it copies. What a push is made of lies in shared memory before it begins, so another process ends what a dead
one has begun: every push gets into all shards, exactly once (``applying.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from apportion.comm.sync import fence, sleep_on
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.batch_queue import LOOK_SECONDS, BatchQueue
from apportion.parallel.parameter_store.push import ShardApplier, StagedPush
from apportion.parallel.parameter_store.store_memory import (
    BASE,
    DEALT,
    ENTRIES,
    PUSHES,
    READY,
    RETURNED,
    STATE,
    TAKEN,
    THEN,
    Array,
    Memory,
    StoreSpec,
)

ALL_USED = 2
READY_SECONDS = 120.0
STILL_SECONDS = 0.0002
"""Between two looks at whether a push that was begun has come to its end."""


@dataclass(frozen=True)
class Contents:
    """Everything that a store holds at one moment."""

    data: list[Tensor]
    """Flat: the weights, and each of the rule's slots."""
    counts: list[Array]
    """By shard: updates behind each of its pieces, where the rule keeps that."""
    touched: Array
    """Which parameters have had an update."""
    buffers: Tensor


@dataclass(frozen=True)
class Snapshot:
    """``done`` updates are in the contents; the batches ``unpushed`` were dealt and are not."""

    done: int
    unpushed: list[int]
    contents: Contents


class Servers(Protocol):
    """Processes that hold the shards, as a worker sees them (``parallel/parameter_store/protocol.py``)."""

    def bring(self, gradient: Tensor, change: Tensor) -> None:
        """Into this seat's place, all of it."""

    def apply(self, push: StagedPush, weights: Tensor, buffers: Tensor) -> list[int] | None:
        """The push to every shard; what comes out into ``weights`` and ``buffers`` where the push pulls, and which
        versions these are (None: the ones that this push has made)."""

    def pull(self, weights: Tensor, buffers: Tensor) -> list[int]:
        """The last versions into these; which they are."""

    def close(self) -> None:
        """Say no more."""


class Store:
    """One worker's view of the store, from its seat; or a ``server``'s, which does what that worker asks. ``check()``
    raises where waiting has become pointless."""

    def __init__(
        self,
        extent: StoreSpec,
        memory: memoryview,
        *,
        seat: int = 0,
        server: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.extent, self.layout, self.rule = extent, extent.layout, extent.layout.rule
        self.seat, self._check = seat, check
        self.memory = m = Memory(extent)
        m.map(memory)
        self.deal = BatchQueue(m, seat, check)
        self._line = m.lines[seat]
        self.gradient = m.gradients[seat]
        """What the next push brings: flat, filled by the caller."""
        self.change = m.changes[seat]
        """The same for the buffers: how much each has changed."""
        self.weights = self._own = m.own[seat]
        """What was pulled: flat."""
        self.buffers = torch.zeros(extent.buffers, dtype=torch.float64)
        self.pulled: Sequence[int] = [0] * extent.shards
        """The version of each shard in ``weights``."""
        self.servers: Servers | None = None
        """Whom everything is asked of; None: this process does it itself."""
        self.applying = ShardApplier(m, seat, server, check)
        first = seat * self.layout.shards // extent.seats
        every = list(range(self.layout.shards))
        self._tour = [*every[first:], *every[:first], *range(self.layout.shards, extent.shards)]
        self._hyper: Sequence[Sequence[float]] | None = None

    @property
    def waited(self) -> float:
        """Seconds, for shards and for others."""
        return self.applying.waited + self.deal.waited

    # The beginning

    def settle(self, start: Callable[[], None], *, first: bool) -> None:
        """Make the locks and fill the store in, as the first; or wait until that is done."""
        m = self.memory
        if first and not m.head[READY]:
            m.make_locks()
            self.applying.open()
            start()
            fence()
            m.head[READY] = 1
        deadline = time.monotonic() + READY_SECONDS
        while not m.head[READY]:
            self._check()
            sleep_on(m.turn, m.turn.value, LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise PeerLost(f"rank 0 has not filled the parameter store within {READY_SECONDS:.0f} s")
        fence()
        if not self.applying.opened:
            self.applying.open()

    def put(self, contents: Contents, *, done: int) -> None:
        """Begin with these, which have so many updates behind them. While nobody pushes."""
        m = self.memory
        for shard in range(self.extent.shards):
            copy = m.live(shard)
            if shard < self.layout.shards:
                a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
                for into, flat in zip((m.weights, *m.slots[copy]), contents.data, strict=True):
                    into[a:b] = flat[a:b]
                m.counts[copy][shard][:] = contents.counts[shard]
            else:
                m.buffers[copy] = contents.buffers
        m.touched[:] = contents.touched
        m.head[BASE] = done - self._pushed()
        m.head[DEALT] = done
        m.head[RETURNED] = 0

    def resume(self, unpushed: Sequence[int]) -> None:
        """These batches were dealt in an earlier run and are not in the weights: they come first."""
        m = self.memory
        m.head[DEALT] = m.head[BASE] + self._pushed() + len(unpushed)
        m.returned[: len(unpushed)] = unpushed
        m.head[RETURNED] = len(unpushed)

    # What workers do

    @property
    def done(self) -> int:
        """Batches whose gradient is in the weights."""
        return self.memory.head[BASE] + self._pushed()

    def _pushed(self) -> int:
        return sum(line[ENTRIES] for line in self.memory.lines)

    @property
    def pushes(self) -> int:
        """By all seats."""
        return sum(line[PUSHES] for line in self.memory.lines)

    def pull(self) -> None:
        """The last version of every shard into ``weights`` (and of the buffers into ``buffers``)."""
        if self.servers is not None:
            self.pulled = self.servers.pull(self.weights, self.buffers)
            return
        self.pulled = self.copy_out(0, self.extent.shards)

    def copy_out(self, first: int, last: int) -> list[int]:
        """The same of these shards; their versions."""
        m, at, found = self.memory, first, list[int]()
        end = min(last, self.layout.shards)
        while at < end:
            many = self.applying.take_some(at, end) if m.copies > 1 else end - at
            found += [m.versions[shard].value for shard in range(at, at + many)]
            a, b = self.layout.bounds[at], self.layout.bounds[at + many]
            self.weights[a:b].copy_(m.weights[a:b])
            if m.copies > 1:
                self.applying.release(at, many)
            at += many
        if last > self.layout.shards:
            found.append(self._copy_buffers())
        return found

    def _copy_buffers(self) -> int:
        m, shard = self.memory, self.layout.shards
        self.applying.take(shard)
        try:
            self.buffers.copy_(m.buffers[m.live(shard)])
            return m.versions[shard].value
        finally:
            self.applying.release(shard)

    def push(self, hyper: Sequence[Sequence[float]], *, used: Sequence[bool] | None = None, pull: bool = True) -> float:
        """Update every shard with ``gradient`` (and the buffers with ``change``), by these hyperparameters of each
        group; ``used``: which parameters have a gradient (None: all). ``pull``: what comes out is pulled on the way.
        Its staleness: pushes of others to a shard since it was pulled, the mean over the shards."""
        if self.servers is not None:
            self.servers.bring(self.gradient, self.change)
        elif self.extent.servers:
            self.line_up()
        push, found = self._begin(hyper, used, pull), None
        if self.servers is not None:
            found = self.servers.apply(push, self.weights, self.buffers)
        else:
            self.apply(push, list(self._tour))
            if pull and self.weights is not self._own:
                self.weights.copy_(self._own)
        self._end(self.seat)
        shards, row = self.memory.shards, self.memory.row(self.seat, push.number)
        made = self.memory.made[row : row + shards]
        stale = sum(made) - sum(self.pulled) - shards
        if pull:
            self.pulled = made if found is None else found
        return stale / shards

    def line_up(self) -> None:
        """What was to be sent comes into this seat's place in memory, where it was not made there."""
        for place, own in ((self.memory.gradients, self.gradient), (self.memory.changes, self.change)):
            if own.data_ptr() != place[self.seat].data_ptr():
                place[self.seat].copy_(own)

    def _begin(self, hyper: Sequence[Sequence[float]], used: Sequence[bool] | None, pull: bool) -> StagedPush:
        """Everything that the push is made of lies in memory: from here on it gets into all shards, whoever dies."""
        m, line = self.memory, self._line
        if hyper is not self._hyper:
            self._hyper = hyper
            for row, values in zip(m.hyper[self.seat], hyper, strict=True):
                row[:] = values
        self._mark_used(used)
        number = line[PUSHES] + 1
        m.made_rows[self.seat, number % m.capacity] = 0
        line[THEN] = line[TAKEN]
        with self.deal.held():  # a snapshot ends first
            line[STATE] = number
        # With servers, one that was asked before another was lost may still be at it.
        return StagedPush(self.seat, number, hyper, used, pull, unsure=self.extent.servers > 0)

    def _mark_used(self, used: Sequence[bool] | None) -> None:
        m = self.memory
        if used is None:
            m.used[self.seat, 0] = ALL_USED
            m.touched[:] = 1
        else:
            m.used[self.seat] = used
            m.touched[np.asarray(used, dtype=bool)] = 1

    def _end(self, seat: int) -> None:
        """Every shard has it."""
        line = self.memory.lines[seat]
        line[ENTRIES] = line[THEN]
        line[PUSHES] = line[STATE]
        fence()
        line[STATE] = 0

    def apply(self, push: StagedPush, left: list[int]) -> None:
        """To these shards."""
        self.applying.apply(push, left, self.buffers)

    @property
    def still(self) -> bool:
        """Is nobody in the middle of a push?"""
        return not any(line[STATE] for line in self.memory.lines)

    # After a death

    def finish(self, seat: int) -> None:
        """End what the process on that seat had begun and cannot end: its push gets into the rest of the shards; the
        batches that it had taken and not pushed are dealt again."""
        self.finish_push(seat)
        self.deal.give_back(seat)

    def finish_push(self, seat: int) -> bool:
        """The first half of that; was there a push under way?"""
        self.applying.resolve(seat)
        push = self.under_way(seat)
        if push is None:
            return False
        if seat == self.seat:
            self._hyper = None
        self.apply(push, [shard for shard in self._tour if not self.applying.has(shard, push)])
        self._end(seat)
        return True

    def under_way(self, seat: int, *, pull: bool = False) -> StagedPush | None:
        """The push that a seat has begun, as it is written down."""
        m, number = self.memory, self.memory.lines[seat][STATE]
        if not number:
            return None
        used = None if m.used[seat, 0] == ALL_USED else [bool(u) for u in m.used[seat]]
        return StagedPush(seat, number, m.hyper[seat].tolist(), used, pull, unsure=True)

    # The whole

    @property
    def nbytes(self) -> int:
        """Of the weights, slots and buffers that all have in common."""
        m = self.memory
        return m.weights.nbytes + m.slots.nbytes + m.buffers.nbytes

    def snapshot(self, check: Callable[[], None], seconds: float) -> Snapshot:
        """Read the store as it is at one moment: every batch is in the weights whole, or said to be unpushed.
        ``check()`` raises where waiting has become pointless; PeerLost is raised where a push that was begun does not
        come to its end within so many seconds."""
        deadline = time.monotonic() + seconds
        with self.deal.held():
            while not self.still:
                check()
                if time.monotonic() > deadline:
                    raise PeerLost(f"a push to the parameter store took more than {seconds:g} s: is a worker stopped?")
                time.sleep(STILL_SECONDS)
            return Snapshot(self.done, self.deal.standing()[1], self.read())

    def read(self) -> Contents:
        """Copies; each shard as one push has left it."""
        m = self.memory
        data = m.weights.new_empty(1 + m.slots.shape[1], self.layout.total)
        counts: list[Array] = []
        buffers = torch.zeros(self.extent.buffers, dtype=torch.float64)
        for shard in range(self.extent.shards):
            self.applying.take(shard)
            try:
                copy = m.live(shard)
                if shard == self.layout.shards:
                    buffers.copy_(m.buffers[copy])
                    continue
                a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
                data[0, a:b].copy_(m.weights[a:b])
                data[1:, a:b].copy_(m.slots[copy, :, a:b])
                counts.append(m.counts[copy][shard].copy())
            finally:
                self.applying.release(shard)
        return Contents(list(data.unbind(0)), counts, m.touched.astype(bool), buffers)
