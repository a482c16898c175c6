"""The store itself: weights and slots in shards, which workers push gradients to and pull weights from.

::

    worker 0  gradient --push--> shard 0 | shard 1 | shard 2 | ...   each: lock, version v, copies v-1 and v
    worker 1  weights  <--pull--                                     a push writes v+1 over v-1, then says "v+1"

A push visits the shards one by one, or a few free ones at a time, and holds their locks while it computes. It writes
the copy that is not live, and one word makes that the live one: a worker that dies in between has changed nothing, and
its lock goes to the next who asks. What a push is made of lies in shared memory before it begins, so another process
ends what a dead one has begun: every push gets into all shards, exactly once.

A pull waits for nobody: it copies, and copies again where a push has come in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from apportion.comm.futex import fence, sleep_on
from apportion.errors import PeerLost
from apportion.store.dealing import LOOK_SECONDS, Dealing
from apportion.store.lock import Lock
from apportion.store.memory import (
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
    Extent,
    Memory,
)

SPIN_SECONDS = 0.00005
"""How long a worker looks for a free shard before it sleeps: a shard is held for less."""
RUN_SHARDS = 8
"""At most so many shards are updated in one go,"""
RUN_BYTES = 1 << 20
"""and no more than a cache holds: what is pulled after a push is read there."""
TRIES = 3
"""Of a pull without the lock."""
ALL_USED = 2
READY_SECONDS = 120.0


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
class Push:
    """A seat's push under way."""

    seat: int
    number: int
    hyper: Sequence[Sequence[float]]
    """Of each group."""
    used: Sequence[bool] | None = None
    """Which parameters have a gradient; None: all."""
    pull: bool = False
    """Is what comes out pulled on the way?"""
    unsure: bool = False
    """May another process be at the same push? Then each shard is asked whether it has it, once it is locked."""


class Servers(Protocol):
    """Processes that hold the shards, as a worker sees them (``store/session.py``)."""

    def bring(self, gradient: Tensor, change: Tensor) -> None:
        """Into this seat's place, all of it."""

    def apply(self, push: Push, weights: Tensor, buffers: Tensor) -> None:
        """The push to every shard; what comes out into ``weights`` and ``buffers`` where the push pulls."""

    def pull(self, weights: Tensor, buffers: Tensor) -> list[int]:
        """The last versions into these; which they are."""

    def close(self) -> None:
        """Say no more."""


class Store:
    """One worker's view of the store, from its seat. ``check()`` raises where waiting has become pointless."""

    def __init__(
        self,
        extent: Extent,
        memory: memoryview,
        *,
        seat: int = 0,
        check: Callable[[], None] = lambda: None,
        weights: Tensor | None = None,
    ) -> None:
        self.extent, self.layout, self.rule = extent, extent.layout, extent.layout.rule
        self.seat, self._check = seat, check
        self.memory = m = Memory(extent)
        m.map(memory)
        self.deal = Dealing(m, seat, check)
        self._line = m.lines[seat]
        self.gradient = m.gradients[seat]
        """What the next push brings: flat, filled by the caller."""
        self.change = m.changes[seat]
        """The same for the buffers: how much each has changed."""
        self.weights = weights if weights is not None else torch.zeros(self.layout.total, dtype=self.layout.dtype)
        """What was pulled: flat, this worker's own."""
        self.buffers = torch.zeros(extent.buffers, dtype=torch.float64)
        self.pulled: Sequence[int] = [0] * extent.shards
        """The version of each shard in ``weights``."""
        self.servers: Servers | None = None
        """Whom everything is asked of; None: this process does it itself."""
        self._waited = 0.0
        self._locks: list[Lock] = []
        shards, bounds = self.layout.shards, self.layout.bounds
        nbytes = max(b - a for a, b in pairwise(bounds)) * self.layout.dtype.itemsize
        self._run = max(1, min(RUN_SHARDS, -(-shards // extent.seats), RUN_BYTES // nbytes))
        first = seat * shards // extent.seats
        every = list(range(shards))
        self._tour = [*every[first:], *every[:first], *range(shards, extent.shards)]
        self._simple = not self.rule.counted and self.layout.many_groups == 1
        self._views: dict[tuple[int, int, int], tuple[list[Tensor], list[Tensor], Tensor, Tensor]] = {}
        self._hyper: Sequence[Sequence[float]] | None = None

    @property
    def waited(self) -> float:
        """Seconds, for shards and for others."""
        return self._waited + self.deal.waited

    # The beginning

    def settle(self, start: Callable[[], None], *, first: bool) -> None:
        """Make the locks and fill the store in, as the first; or wait until that is done."""
        m = self.memory
        if first and not m.head[READY]:
            m.make_locks()
            self._open()
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
        if not self._locks:
            self._open()

    def _open(self) -> None:
        self.memory.open_locks()
        self._locks = self.memory.locks
        self._take = [lock.attempt for lock in self._locks]
        self._release = [lock.release for lock in self._locks]

    def put(self, contents: Contents, *, done: int) -> None:
        """Begin with these, which have so many updates behind them. While nobody pushes."""
        m = self.memory
        for shard in range(self.extent.shards):
            copy = m.live(shard)
            if shard < self.layout.shards:
                a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
                for into, flat in zip(m.data[copy], contents.data, strict=True):
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
        versions, m, at = self.memory.versions, self.memory, first
        end, found = min(last, self.layout.shards), []
        while at < end:
            seen = [versions[at].value]
            copy = seen[0] & (m.copies - 1)
            while len(seen) < RUN_SHARDS and at + len(seen) < end:
                version = versions[at + len(seen)].value
                if version & (m.copies - 1) != copy:
                    break
                seen.append(version)
            a, b = self.layout.bounds[at], self.layout.bounds[at + len(seen)]
            fence()
            self.weights[a:b].copy_(m.data[copy, 0, a:b])
            fence()
            for shard, version in enumerate(seen, at):
                changed = m.copies > 1 and versions[shard].value != version
                found.append(self._pull_again(shard) if changed else version)
            at += len(seen)
        if last > self.layout.shards:
            found.append(self._pull_again(self.layout.shards))
        return found

    def _pull_again(self, shard: int) -> int:
        """One shard that was pushed to meanwhile: its version."""
        version = self.memory.versions[shard]
        for _ in range(TRIES):
            seen = version.value
            fence()
            self._copy_out(shard, seen)
            fence()
            if version.value == seen or self.memory.copies == 1:
                return seen
        self._take_lock(shard)
        try:
            self._copy_out(shard, version.value)
            return version.value
        finally:
            self._locks[shard].release()

    def _copy_out(self, shard: int, version: int) -> None:
        m = self.memory
        copy = version & (m.copies - 1)
        if shard < self.layout.shards:
            a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
            self.weights[a:b].copy_(m.data[copy, 0, a:b])
        else:
            self.buffers.copy_(m.buffers[copy])

    def push(self, hyper: Sequence[Sequence[float]], *, used: Sequence[bool] | None = None, pull: bool = True) -> float:
        """Update every shard with ``gradient`` (and the buffers with ``change``), by these hyperparameters of each
        group; ``used``: which parameters have a gradient (None: all). ``pull``: what comes out is pulled on the way.
        Its staleness: pushes of others to a shard since it was pulled, the mean over the shards."""
        if self.servers is not None:
            self.servers.bring(self.gradient, self.change)
        elif self.extent.servers:
            self._line_up()
        push = self._begin(hyper, used, pull)
        if self.servers is not None:
            self.servers.apply(push, self.weights, self.buffers)
        else:
            self.apply(push, list(self._tour))
        self._end(self.seat)
        shards, row = self.memory.shards, self.memory.row(self.seat, push.number)
        made = self.memory.made[row : row + shards]
        stale = sum(made) - sum(self.pulled) - shards
        if pull:
            self.pulled = made
        return stale / shards

    def _line_up(self) -> None:
        """With no server left, what was to be sent comes into this seat's place by itself."""
        self.memory.gradients[self.seat].copy_(self.gradient)
        self.memory.changes[self.seat].copy_(self.change)

    def _begin(self, hyper: Sequence[Sequence[float]], used: Sequence[bool] | None, pull: bool) -> Push:
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
        fence()
        line[STATE] = number
        return Push(self.seat, number, hyper, used, pull)

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

    def apply(self, push: Push, left: list[int]) -> None:
        """To these shards."""
        if self.memory.copies == 1:
            self._apply_free(push, left)
        else:
            self._apply_locked(push, left)

    def _apply_locked(self, push: Push, left: list[int]) -> None:
        release, versions, made = self._release, self.memory.versions, self.memory.made
        row, at = self.memory.row(push.seat, push.number), 0
        while left:
            first = left[at]
            if not self._try(first):
                at += 1
                if at < len(left):
                    continue
                first = self._take_any(left)
                at = left.index(first)
            taken = 1
            if push.unsure and self._has(first, push):
                release[first]()
            else:
                seen = self._take_run(push, left, at)
                taken = len(seen)
                self._update(push, first, taken, seen[0] & 1)
                for shard, version in enumerate(seen, first):
                    made[row + shard] = version + 1
                fence()
                for shard, version in enumerate(seen, first):
                    versions[shard].value = version + 1
                    release[shard]()
            del left[at : at + taken]
            if at >= len(left):
                at = 0

    def _take_run(self, push: Push, left: Sequence[int], at: int) -> list[int]:
        """One shard's lock is held: those of the next ones too, as long as they are free, and their live copy is the
        same one: they are updated in one go. Their versions."""
        take, versions, first = self._take, self.memory.versions, left[at]
        seen = [versions[first].value]
        shards = left[at + 1 : at + self._run]
        for shard, next_one in zip(shards, range(first + 1, self.layout.shards), strict=False):
            if shard != next_one or ((failed := take[shard]()) and not self._inherit(shard, failed)):
                break
            version = versions[shard].value
            if (version ^ seen[0]) & 1 or (push.unsure and self._has(shard, push)):
                self._release[shard]()
                break
            seen.append(version)
        return seen

    def _has(self, shard: int, push: Push) -> bool:
        """Is that push in this shard already? Holding its lock, or with nobody who could push it meanwhile."""
        m = self.memory
        return 0 < m.made[m.row(push.seat, push.number) + shard] <= m.versions[shard].value

    def _try(self, shard: int) -> bool:
        """Take a lock that nobody who lives holds."""
        failed = self._take[shard]()
        return not failed or self._inherit(shard, failed)

    def _inherit(self, shard: int, failed: int) -> bool:
        """Is a dead worker's lock this one's? What it was about to make of the shard has not been made."""
        if not self._locks[shard].is_orphan(failed):
            return False
        m, version = self.memory, self.memory.versions[shard].value
        for seat in range(self.extent.seats):
            if m.lines[seat][STATE]:
                at = m.row(seat, m.lines[seat][STATE]) + shard
                if m.made[at] > version:
                    m.made[at] = 0
        self._locks[shard].adopt()
        return True

    def _take_lock(self, shard: int) -> None:
        """Wait for a shard."""
        if failed := self._locks[shard].wait(self._check):
            self._inherit(shard, failed)

    def _take_any(self, left: Sequence[int]) -> int:
        """The lock of one of these shards, all of which were taken a moment ago: looked for, and then slept for."""
        began = time.perf_counter()
        until = began + SPIN_SECONDS
        while time.perf_counter() < until:
            for shard in left:
                if self._try(shard):
                    return shard
        self._take_lock(left[0])
        self._waited += time.perf_counter() - began
        return left[0]

    def _apply_free(self, push: Push, left: list[int]) -> None:
        """All at once, with nobody asked."""
        m, row = self.memory, self.memory.row(push.seat, push.number)
        self._update(push, 0, self.layout.shards, 0)
        if self.extent.buffers:
            self._update(push, self.layout.shards, 1, 0)
        for shard in left:
            version = m.versions[shard].value + 1
            m.made[row + shard] = m.versions[shard].value = version

    def _update(self, push: Push, first: int, n: int, copy: int) -> None:
        """So many shards from the first on, whose live copy is this one, into the other."""
        if first >= self.layout.shards:
            self._update_buffers(push, copy)
            return
        if push.seat == self.seat and push.used is None and self._simple:
            views = self._views.get((copy, first, n))
            if views is None:
                views = self._views[copy, first, n] = self._views_of(copy, first, n)
            new, old, gradient, out = views
            self.rule.apply(new, old, gradient, push.hyper[0], 0)
            if push.pull:
                out.copy_(new[0])
            return
        for shard in range(first, first + n):
            self._update_shard(push, shard, copy)

    def _views_of(self, copy: int, first: int, n: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        m, a, b = self.memory, self.layout.bounds[first], self.layout.bounds[first + n]
        new, old = (list(m.data[which, :, a:b].unbind(0)) for which in (m.copies - 1 - copy, copy))
        return new, old, m.gradients[self.seat, a:b], self.weights[a:b]

    def _update_shard(self, push: Push, shard: int, copy: int) -> None:
        """Piece by piece: groups, counts and parameters without a gradient."""
        m, other = self.memory, self.memory.copies - 1 - copy
        before, after = m.counts[copy][shard], m.counts[other][shard]
        for number, piece in enumerate(self.layout.pieces[shard]):
            new, old = m.data[other, :, piece.start : piece.stop], m.data[copy, :, piece.start : piece.stop]
            count = before[number]
            if push.used is None or push.used[piece.parameter]:
                gradient = m.gradients[push.seat, piece.start : piece.stop]
                self.rule.apply(new.unbind(0), old.unbind(0), gradient, push.hyper[piece.group], float(count))
                after[number] = count + 1
            elif other != copy:
                new.copy_(old)
                after[number] = count
        if push.pull:
            a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
            self.weights[a:b].copy_(m.data[other, 0, a:b])

    def _update_buffers(self, push: Push, copy: int) -> None:
        m, other = self.memory, self.memory.copies - 1 - copy
        torch.add(m.buffers[copy], m.changes[push.seat], out=m.buffers[other])
        if push.pull:
            self.buffers.copy_(m.buffers[other])

    # After a death

    def finish(self, seat: int) -> None:
        """End what the process on that seat had begun and cannot end: its push gets into the rest of the shards; the
        batches that it had taken and not pushed are dealt again."""
        self.finish_push(seat)
        self.deal.give_back(seat)

    def finish_push(self, seat: int) -> bool:
        """The first half of that; was there a push under way?"""
        push = self.under_way(seat)
        if push is None:
            return False
        if seat == self.seat:
            self._hyper = None
        self.apply(push, [shard for shard in self._tour if not self._has(shard, push)])
        self._end(seat)
        return True

    def under_way(self, seat: int, *, pull: bool = False) -> Push | None:
        """The push that a seat has begun, as it is written down."""
        m, number = self.memory, self.memory.lines[seat][STATE]
        if not number:
            return None
        used = None if m.used[seat, 0] == ALL_USED else [bool(u) for u in m.used[seat]]
        return Push(seat, number, m.hyper[seat].tolist(), used, pull, unsure=True)

    # The whole

    def read(self) -> Contents:
        """Copies; each shard as one push has left it."""
        m = self.memory
        data = torch.empty_like(m.data[0])
        counts: list[Array] = []
        buffers = torch.zeros(self.extent.buffers, dtype=torch.float64)
        for shard in range(self.extent.shards):
            self._take_lock(shard)
            try:
                copy = m.live(shard)
                if shard == self.layout.shards:
                    buffers.copy_(m.buffers[copy])
                    continue
                a, b = self.layout.bounds[shard], self.layout.bounds[shard + 1]
                data[:, a:b].copy_(m.data[copy, :, a:b])
                counts.append(m.counts[copy][shard].copy())
            finally:
                self._locks[shard].release()
        return Contents(list(data.unbind(0)), counts, m.touched.astype(bool), buffers)
