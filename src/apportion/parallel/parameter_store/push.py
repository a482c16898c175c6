"""The steps by which a push gets into its shards.

::

    lock a few free shards
      drafts = weights - lr * gradient, slots of version v+1     which no worker reads yet
      "these drafts are good"                                    from here on the heir of the lock copies them
      weights = drafts
      version v+1; release

A worker drafts into its own weights where its push pulls: they are then what it has pulled, and a push moves no more
memory than the same update without locks. A worker that dies while it drafts has changed nothing; one that dies later
has left everything behind that others need to end its push, and its lock goes to the next worker that asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor

from apportion.comm.process_lock import Lock
from apportion.comm.sync import CommitWord, fence
from apportion.parallel.parameter_store.memory.shard_layout import updates_alike
from apportion.parallel.parameter_store.memory.store_memory import OWN, SCRATCH, StoreMemory

SPIN_SECONDS = 0.00005
"""The seconds for which a worker looks for a free shard before it sleeps: a shard is held for less."""


@dataclass(frozen=True)
class StagedPush:
    """A worker's push under way."""

    worker: int
    number: int
    hyper: Sequence[Sequence[float]]
    """The hyperparameters of each parameter group."""
    used: Sequence[bool] | None = None
    """Flags that say which parameters have a gradient; None: all."""
    pull: bool = False
    """Tells whether the updated weights are pulled in the course of the push."""
    unsure: bool = False
    """Tells whether another process may be applying the same push. Then each shard is asked whether it has the push,
    once it is locked."""


class _ShardStretch(NamedTuple):
    """Some shards that follow one another, and where each part of their update lies."""

    weights: Tensor
    drafts: Tensor
    old: list[Tensor]
    new: list[Tensor]
    gradient: Tensor


@final
class ShardApplier:
    """One process's access to the shards, in its own name or for a worker. ``server``: the number of the
    server that this is. ``check()`` raises where waiting has become pointless."""

    def __init__(self, memory: StoreMemory, worker: int, server: int | None, check: Callable[[], None]) -> None:
        self.memory, self.worker, self._check = memory, worker, check
        self._applier = worker + memory.extent.workers * (0 if server is None else 1 + server)
        self.layout, self.rule = memory.extent.layout, memory.extent.layout.rule
        self.waited = 0.0
        """The seconds spent waiting for shards."""
        self._draft = memory.drafts[self._applier]
        self._place = self._draft.word("place")
        self._run = memory.extent.run
        self._stretches: dict[tuple[bool, int, int, int], _ShardStretch] = {}
        self._locks: list[Lock] = []

    @property
    def is_open(self) -> bool:
        """Tells whether the locks are open and can be taken."""
        return bool(self._locks)

    def open_locks(self) -> None:
        """Open the locks, once they are made."""
        self.memory.open_locks()
        self._locks = self.memory.locks
        self._attempt = [lock.attempt for lock in self._locks]
        self._release = [lock.release for lock in self._locks]

    def apply(self, push: StagedPush, left: list[int], buffers: Tensor) -> None:
        """Apply a push to these shards; ``buffers`` receives the new buffers where the push pulls."""
        if self.memory.shards.copies == 1:
            self._apply_free(push, left, buffers)
        else:
            self._apply_locked(push, left, buffers)

    def _apply_free(self, push: StagedPush, left: list[int], buffers: Tensor) -> None:
        """Apply a push to all shards at once, without locks. A process that dies in between counts as having made the
        push: it cannot be found out how far it came, and the push is not made twice."""
        m, row, shards = self.memory, self.memory.log.row(push.worker, push.number), self.layout.shards
        if not left:
            return
        # The versions are counted before the arithmetic: a process that dies in between counts as having pushed, and
        # the gradient is never applied twice. Two workers that count at once may lose a count, as hogwild allows.
        for shard in left:
            version = m.shards.versions[shard].value + 1
            m.log.made[row + shard] = m.shards.versions[shard].value = version
        self.update(push, 0, shards, 0)
        if push.pull:
            m.workers.own[self.worker].copy_(m.shards.weights)
        if m.extent.buffers:
            self._update_buffers(push, 0, buffers)

    def _apply_locked(self, push: StagedPush, left: list[int], buffers: Tensor) -> None:
        at = 0
        while left:
            first = left[at]
            if not self._try_lock(first):
                at += 1
                if at < len(left):
                    continue
                first = self._lock_any(left)
                at = left.index(first)
            taken = 1
            if push.unsure and self.has_push(first, push):
                self._release[first]()
            else:
                seen = self._lock_run(push, left, at)
                taken = len(seen)
                self._apply_run(push, first, seen, buffers)
            del left[at : at + taken]
            if at >= len(left):
                at = 0

    def _apply_run(self, push: StagedPush, first: int, seen: Sequence[int], buffers: Tensor) -> None:
        """Apply a push to consecutive shards beginning with ``first``, whose versions are ``seen`` and whose locks are
        held; the locks are released."""
        m, draft, versions = self.memory, self._draft, self.memory.shards.versions
        made, row, copy = m.log.made, m.log.row(push.worker, push.number) + first, seen[0] & 1
        if first == self.layout.shards:
            self._update_buffers(push, copy, buffers)
            made[row] = seen[0] + 1
        else:
            stretch = self.update(push, first, len(seen), copy)
            # The log names the versions before the shards have them. An entry above its shard's version is therefore an
            # update that was cut off: the heir of the lock completes it where its drafts are good, or deletes it.
            for at, version in enumerate(seen, row):
                made[at] = version + 1
            # The record is withdrawn before its other fields change, and published after them: another process that
            # reads a place reads fields that belong together.
            self._place.withdraw()  # drafts of who was here before
            draft.worker, draft.number, draft.first, draft.shards = push.worker, push.number, first, len(seen)
            self._place.publish(OWN if self._into_own(push) else SCRATCH)
            # No weight may be written over before the drafts are declared good. From here on a death leaves torn
            # weights, which the heir of the lock repairs from the drafts.
            fence()
            stretch.weights.copy_(stretch.drafts)
        # The weights come before the version: the version says that the shard is whole. Each version is one word, so
        # that a run that is cut off in the middle leaves some shards with the push and others without, and none in
        # between.
        fence()
        for shard, version in enumerate(seen, first):
            versions[shard].value = version + 1
        # A death before the last version is written is repaired from the drafts, so they are withdrawn after it; and
        # before the locks are released, so that a record of drafts only ever names shards that its process holds.
        fence()
        self._place.withdraw()
        for shard in range(first, first + len(seen)):
            self._release[shard]()

    def _lock_run(self, push: StagedPush, left: Sequence[int], at: int) -> list[int]:
        """Extend a run of shards that begins with one whose lock is held: take the locks of the next ones, as long as
        they are free, and their live slots are in the same copy, so that all are updated in one go. Returns their
        versions."""
        versions, first = self.memory.shards.versions, left[at]
        seen = [versions[first].value]
        shards = left[at + 1 : at + self._run]
        for shard, next_one in zip(shards, range(first + 1, self.layout.shards), strict=False):
            # Only a lock that is free is taken here. To wait for one while others are held could deadlock with a worker
            # that takes its shards in another order.
            if shard != next_one or not self._try_lock(shard):
                break
            version = versions[shard].value
            # The parity of the version tells which copy of the slots is live.
            if (version ^ seen[0]) & 1 or (push.unsure and self.has_push(shard, push)):
                self._release[shard]()
                break
            seen.append(version)
        return seen

    def has_push(self, shard: int, push: StagedPush) -> bool:
        """Return whether a shard has that push already. Called with its lock held, or while no process can push it."""
        m = self.memory
        return 0 < m.log.made[m.log.row(push.worker, push.number) + shard] <= m.shards.versions[shard].value

    # Locks

    def lock(self, shard: int) -> None:
        """Wait for a shard's lock, and take it."""
        if failed := self._locks[shard].wait(self._check):
            self._inherit(shard, failed)

    def lock_run(self, first: int, last: int) -> int:
        """Wait for the first of these shards, and take those after it that are free, up to the number that is updated
        in one go; returns how many are taken."""
        self.lock(first)
        end = first + 1
        while end < min(last, first + self._run) and self._try_lock(end):
            end += 1
        return end - first

    def release(self, first: int, count: int = 1) -> None:
        """Release the locks of these shards."""
        for shard in range(first, first + count):
            self._release[shard]()

    def _try_lock(self, shard: int) -> bool:
        """Try to take a shard's lock, and return whether that went well; the lock of a dead holder is inherited."""
        failed = self._attempt[shard]()
        return not failed or self._inherit(shard, failed)

    def _lock_any(self, left: Sequence[int]) -> int:
        """Take the lock of one of these shards, all of which were taken a moment ago: spin for it first, then sleep.
        Returns the shard."""
        began = time.perf_counter()
        until = began + SPIN_SECONDS
        while time.perf_counter() < until:
            for shard in left:
                if self._try_lock(shard):
                    return shard
        self.lock(left[0])
        self.waited += time.perf_counter() - began
        return left[0]

    def _inherit(self, shard: int, failed: int) -> bool:
        """Inherit a dead worker's lock, and return whether that is what this lock was. Good drafts of the dead worker
        are copied into the shard; records of updates to it that were not completed are deleted."""
        if not self._locks[shard].is_orphan(failed):
            return False
        m = self.memory
        for applier, draft in enumerate(m.drafts):
            if draft.place and draft.first <= shard < draft.first + draft.shards:
                self._copy_drafts(applier, shard)
        # An entry of the log above the shard's version is of an update that the dead process had not completed. It goes
        # before the lock is released, or has_push() would take the next update of another worker for it.
        for worker, line in enumerate(m.lines):
            if line.pushing:
                at = m.log.row(worker, line.pushing) + shard
                if m.log.made[at] > m.shards.versions[shard].value:
                    m.log.made[at] = 0
        self._locks[shard].adopt()
        return True

    def _copy_drafts(self, applier: int, shard: int) -> None:
        """Copy one process's drafts into a shard, unless the shard has them, or they belong to a push that is over."""
        m, draft = self.memory, self.memory.drafts[applier]
        version, pusher, number = m.shards.versions[shard], draft.worker, draft.number
        # A draft may outlive its push: its worker has begun another one, or this shard has it already. Version and log
        # decide, so that a draft is copied once, whichever process inherits first.
        if m.lines[pusher].pushing != number or m.log.made[m.log.row(pusher, number) + shard] != version.value + 1:
            return
        start, a, b = (self.layout.bounds[at] for at in (draft.first, shard, shard + 1))
        drafts = m.workers.own[pusher, a:b] if draft.place == OWN else m.workers.scratch[applier, a - start : b - start]
        m.shards.weights[a:b].copy_(drafts)
        CommitWord(version).publish(version.value + 1)

    def resolve(self, worker: int) -> None:
        """Make sure that the drafts left by the processes that applied that worker's pushes are no longer needed. The
        record stays: it may belong to a server that lives."""
        for draft in self.memory.drafts[worker :: self.memory.extent.workers]:
            if draft.place:
                for shard in range(draft.first, draft.first + draft.shards):
                    # Taking the lock of a dead holder is what repairs the shard.
                    self.lock(shard)
                    self._release[shard]()

    # Arithmetic

    def _into_own(self, push: StagedPush) -> bool:
        return push.pull and push.worker == self.worker

    def update(self, push: StagedPush, first: int, shard_count: int, copy: int) -> _ShardStretch:
        """Compute the update of consecutive shards whose live slots are in this copy: drafts of their weights, and the
        slots in the other copy. Without locks the drafts are the weights."""
        key = self._into_own(push), copy, first, shard_count
        stretch = self._stretches.get(key) if push.worker == self.worker else None
        if stretch is None:
            stretch = self._stretch(push, first, shard_count, copy)
            if push.worker == self.worker:
                self._stretches[key] = stretch
        shards, m = range(first, first + shard_count), self.memory.shards
        whole = push.used is None and self.layout.group_count == 1
        count = updates_alike(self.rule, m.counts[copy][first : first + shard_count]) if whole else None
        if count is None:
            self._update_pieces(push, stretch, shards, copy)
            return stretch
        self.rule.apply(stretch.new, stretch.old, stretch.gradient, push.hyper[0], count)
        for counts in m.counts[m.copies - 1 - copy][first : first + shard_count] if self.rule.counted else ():
            counts.fill(count + 1)
        return stretch

    def _stretch(self, push: StagedPush, first: int, shard_count: int, copy: int) -> _ShardStretch:
        m, a, b = self.memory, self.layout.bounds[first], self.layout.bounds[first + shard_count]
        weights, other = m.shards.weights[a:b], m.shards.copies - 1 - copy
        drafts = weights
        if m.shards.copies == 2:
            drafts = (
                m.workers.own[self.worker, a:b] if self._into_own(push) else m.workers.scratch[self._applier, : b - a]
            )
        old, new = ([*m.shards.slots[which, :, a:b].unbind(0)] for which in (copy, other))
        return _ShardStretch(weights, drafts, [weights, *old], [drafts, *new], m.workers.gradients[push.worker, a:b])

    def _update_pieces(self, push: StagedPush, stretch: _ShardStretch, shards: range, copy: int) -> None:
        """Update the shards piece by piece, which takes account of groups, counts, and parameters without a
        gradient."""
        m, other = self.memory, self.memory.shards.copies - 1 - copy
        begin = self.layout.bounds[shards.start]
        if other != copy:
            stretch.drafts.copy_(stretch.weights)  # also where no piece lies
        for shard in shards:
            before, after = m.shards.counts[copy][shard], m.shards.counts[other][shard]
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
        m, other = self.memory, self.memory.shards.copies - 1 - copy
        m.shards.buffers[other] = m.shards.buffers[copy] + m.workers.changes[push.worker]
        if push.pull:
            buffers.copy_(m.shards.buffers[other])
