"""How a push gets into its shards.

::

    lock a few free shards
      drafts = weights - lr * gradient, slots of version v+1     where nobody looks yet
      "these drafts are good"                                    from here on whoever inherits the lock copies them
      weights = drafts
      version v+1; release

What a worker drafts into is, where its push pulls, its own weights: they are then what it has pulled, and a push moves
no more memory than the same update without locks. A worker that dies while it drafts has changed nothing; one that dies
later has left everything behind that others need to end it, and its lock goes to the next who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor

from apportion.comm.process_lock import Lock
from apportion.comm.sync import fence
from apportion.parallel.parameter_store.store_memory import (
    DRAFTS,
    FIRST,
    NUMBER,
    OWN,
    PUSHER,
    SCRATCH,
    SHARDS,
    STATE,
    Memory,
)

SPIN_SECONDS = 0.00005
"""How long a worker looks for a free shard before it sleeps: a shard is held for less."""


@dataclass(frozen=True)
class StagedPush:
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


class _ShardStretch(NamedTuple):
    """Some shards that follow one another, and where each part of their update lies."""

    weights: Tensor
    drafts: Tensor
    old: list[Tensor]
    new: list[Tensor]
    gradient: Tensor


@final
class ShardApplier:
    """One process's hands on the shards, for the worker of a seat or as it. ``server``: the number of the server that
    this is. ``check()`` raises where waiting has become pointless."""

    def __init__(self, memory: Memory, seat: int, server: int | None, check: Callable[[], None]) -> None:
        self.memory, self.seat, self._check = memory, seat, check
        self._hands = seat + memory.extent.seats * (0 if server is None else 1 + server)
        self.layout, self.rule = memory.extent.layout, memory.extent.layout.rule
        self.waited = 0.0
        """Seconds, for shards."""
        self._line = memory.drafts[self._hands]
        self._simple = not self.rule.counted and self.layout.many_groups == 1
        self._stretches: dict[tuple[bool, int, int, int], _ShardStretch] = {}
        self._locks: list[Lock] = []

    @property
    def opened(self) -> bool:
        """Are there locks to take?"""
        return bool(self._locks)

    def open(self) -> None:
        """The locks are made."""
        self.memory.open_locks()
        self._locks = self.memory.locks
        self._take = [lock.attempt for lock in self._locks]
        self._release = [lock.release for lock in self._locks]

    def apply(self, push: StagedPush, left: list[int], buffers: Tensor) -> None:
        """To these shards; ``buffers`` are what is pulled of them."""
        if self.memory.copies == 1:
            self._apply_free(push, left, buffers)
        else:
            self._apply_locked(push, left, buffers)

    def _apply_free(self, push: StagedPush, left: list[int], buffers: Tensor) -> None:
        """All at once, with nobody asked. Whoever dies in between has made it: nobody can tell how far it came, and it
        is not made twice."""
        m, row, shards = self.memory, self.memory.row(push.seat, push.number), self.layout.shards
        if not left:
            return
        for shard in left:
            version = m.versions[shard].value + 1
            m.made[row + shard] = m.versions[shard].value = version
        self.update(push, 0, shards, 0)
        if push.pull:
            m.own[self.seat].copy_(m.weights)
        if m.extent.buffers:
            self._update_buffers(push, 0, buffers)

    def _apply_locked(self, push: StagedPush, left: list[int], buffers: Tensor) -> None:
        at = 0
        while left:
            first = left[at]
            if not self._try(first):
                at += 1
                if at < len(left):
                    continue
                first = self._take_any(left)
                at = left.index(first)
            taken = 1
            if push.unsure and self.has(first, push):
                self._release[first]()
            else:
                seen = self._take_run(push, left, at)
                taken = len(seen)
                self._apply_run(push, first, seen, buffers)
            del left[at : at + taken]
            if at >= len(left):
                at = 0

    def _apply_run(self, push: StagedPush, first: int, seen: Sequence[int], buffers: Tensor) -> None:
        """To the shards from the first on, whose versions these are and whose locks are held; they are released."""
        m, line, versions = self.memory, self._line, self.memory.versions
        made, row, copy = m.made, m.row(push.seat, push.number) + first, seen[0] & 1
        if first == self.layout.shards:
            self._update_buffers(push, copy, buffers)
            made[row] = seen[0] + 1
        else:
            stretch = self.update(push, first, len(seen), copy)
            for at, version in enumerate(seen, row):
                made[at] = version + 1
            line[DRAFTS] = 0  # of who was here before
            fence()
            line[PUSHER], line[NUMBER], line[FIRST], line[SHARDS] = push.seat, push.number, first, len(seen)
            fence()
            line[DRAFTS] = OWN if self._into_own(push) else SCRATCH
            fence()
            stretch.weights.copy_(stretch.drafts)
        fence()
        for shard, version in enumerate(seen, first):
            versions[shard].value = version + 1
        fence()
        line[DRAFTS] = 0
        fence()
        for shard in range(first, first + len(seen)):
            self._release[shard]()

    def _take_run(self, push: StagedPush, left: Sequence[int], at: int) -> list[int]:
        """One shard's lock is held: those of the next ones too, as long as they are free, and their live slots are in
        the same copy: they are updated in one go. Their versions."""
        versions, first = self.memory.versions, left[at]
        seen = [versions[first].value]
        shards = left[at + 1 : at + self.memory.run]
        for shard, next_one in zip(shards, range(first + 1, self.layout.shards), strict=False):
            if shard != next_one or not self._try(shard):
                break
            version = versions[shard].value
            if (version ^ seen[0]) & 1 or (push.unsure and self.has(shard, push)):
                self._release[shard]()
                break
            seen.append(version)
        return seen

    def has(self, shard: int, push: StagedPush) -> bool:
        """Is that push in this shard already? Holding its lock, or with nobody who could push it meanwhile."""
        m = self.memory
        return 0 < m.made[m.row(push.seat, push.number) + shard] <= m.versions[shard].value

    # Locks

    def take(self, shard: int) -> None:
        """Wait for a shard."""
        if failed := self._locks[shard].wait(self._check):
            self._inherit(shard, failed)

    def take_some(self, first: int, last: int) -> int:
        """Wait for the first of these shards, and take those after it that are free, as far as is done in one go: how
        many."""
        self.take(first)
        end = first + 1
        while end < min(last, first + self.memory.run) and self._try(end):
            end += 1
        return end - first

    def release(self, first: int, many: int = 1) -> None:
        """These shards."""
        for shard in range(first, first + many):
            self._release[shard]()

    def _try(self, shard: int) -> bool:
        """Take a lock that nobody who lives holds."""
        failed = self._take[shard]()
        return not failed or self._inherit(shard, failed)

    def _take_any(self, left: Sequence[int]) -> int:
        """The lock of one of these shards, all of which were taken a moment ago: looked for, and then slept for."""
        began = time.perf_counter()
        until = began + SPIN_SECONDS
        while time.perf_counter() < until:
            for shard in left:
                if self._try(shard):
                    return shard
        self.take(left[0])
        self.waited += time.perf_counter() - began
        return left[0]

    def _inherit(self, shard: int, failed: int) -> bool:
        """Is a dead worker's lock this one's? Its good drafts come into the shard; what else it was about to make of it
        has not been made."""
        if not self._locks[shard].is_orphan(failed):
            return False
        m = self.memory
        for hands, line in enumerate(m.drafts):
            if line[DRAFTS] and line[FIRST] <= shard < line[FIRST] + line[SHARDS]:
                self._copy_drafts(hands, shard)
        for seat, line in enumerate(m.lines):
            if line[STATE]:
                at = m.row(seat, line[STATE]) + shard
                if m.made[at] > m.versions[shard].value:
                    m.made[at] = 0
        self._locks[shard].adopt()
        return True

    def _copy_drafts(self, hands: int, shard: int) -> None:
        """These, unless they have come in, or are of a push that is over."""
        m, line = self.memory, self.memory.drafts[hands]
        version, pusher = m.versions[shard], line[PUSHER]
        if m.lines[pusher][STATE] != line[NUMBER] or m.made[m.row(pusher, line[NUMBER]) + shard] != version.value + 1:
            return
        start, a, b = (self.layout.bounds[at] for at in (line[FIRST], shard, shard + 1))
        drafts = m.own[pusher, a:b] if line[DRAFTS] == OWN else m.scratch[hands, a - start : b - start]
        m.weights[a:b].copy_(drafts)
        fence()
        version.value += 1

    def resolve(self, seat: int) -> None:
        """See to it that nobody needs the drafts any more that who applied that seat's pushes has left. The record
        stays: it may be a server's that lives."""
        for line in self.memory.drafts[seat :: self.memory.extent.seats]:
            if line[DRAFTS]:
                for shard in range(line[FIRST], line[FIRST] + line[SHARDS]):
                    self.take(shard)
                    self._release[shard]()

    # Arithmetic

    def _into_own(self, push: StagedPush) -> bool:
        return push.pull and push.seat == self.seat

    def update(self, push: StagedPush, first: int, many: int, copy: int) -> _ShardStretch:
        """So many shards, whose live slots are in this copy: drafts of their weights, and the slots in the other copy.
        Without locks the drafts are the weights."""
        key = self._into_own(push), copy, first, many
        stretch = self._stretches.get(key) if push.seat == self.seat else None
        if stretch is None:
            stretch = self._stretch(push, first, many, copy)
            if push.seat == self.seat:
                self._stretches[key] = stretch
        if push.used is None and self._simple:
            self.rule.apply(stretch.new, stretch.old, stretch.gradient, push.hyper[0], 0)
        else:
            self._update_pieces(push, stretch, range(first, first + many), copy)
        return stretch

    def _stretch(self, push: StagedPush, first: int, many: int, copy: int) -> _ShardStretch:
        m, a, b = self.memory, self.layout.bounds[first], self.layout.bounds[first + many]
        weights, other = m.weights[a:b], m.copies - 1 - copy
        drafts = weights
        if m.copies == 2:
            drafts = m.own[self.seat, a:b] if self._into_own(push) else m.scratch[self._hands, : b - a]
        old, new = ([*m.slots[which, :, a:b].unbind(0)] for which in (copy, other))
        return _ShardStretch(weights, drafts, [weights, *old], [drafts, *new], m.gradients[push.seat, a:b])

    def _update_pieces(self, push: StagedPush, stretch: _ShardStretch, shards: range, copy: int) -> None:
        """Piece by piece: groups, counts, and parameters without a gradient."""
        m, other = self.memory, self.memory.copies - 1 - copy
        begin = self.layout.bounds[shards.start]
        if other != copy:
            stretch.drafts.copy_(stretch.weights)  # also where no piece lies
        for shard in shards:
            before, after = m.counts[copy][shard], m.counts[other][shard]
            for number, piece in enumerate(self.layout.pieces[shard]):
                at = slice(piece.start - begin, piece.stop - begin)
                old, new = [t[at] for t in stretch.old], [t[at] for t in stretch.new]
                count = before[number]
                if push.used is None or push.used[piece.parameter]:
                    self.rule.apply(new, old, stretch.gradient[at], push.hyper[piece.group], float(count))
                    after[number] = count + 1
                elif other != copy:
                    for slot, kept in zip(new[1:], old[1:], strict=True):
                        slot.copy_(kept)
                    after[number] = count

    def _update_buffers(self, push: StagedPush, copy: int, buffers: Tensor) -> None:
        m, other = self.memory, self.memory.copies - 1 - copy
        m.buffers[other] = m.buffers[copy] + m.changes[push.seat]
        if push.pull:
            buffers.copy_(m.buffers[other])
