"""The average of replicas in memory that outlives each of them: a replica that died or is late does not hold up the
others, and no death loses the average.

::

    word c            version c % 2 is the last average
    version 0, 1      weights, slots | which contributions it holds | which batches it hands to which slot
    a slot each       its batches | its contribution, written by itself

A replica that has arrived and finds that all the others have too, or that the rest are late, takes the lock, computes
the next version from the contributions that are there, and turns the word. A replica that dies in the middle leaves the
last average, whole, and the contributions; the lock passes on.

A contribution is a change, so it may be added to any later average, and it is added to one: each version says up to
which contribution of each slot it holds them. The memory of a slot's contribution is written again only once an average
holds it. Batches belong to a slot from when it takes them to when it has given what it learnt from them: the next
process on that slot does them again.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np

from apportion.comm.process_lock import LOCK_BYTES, Lock, initialize
from apportion.comm.sync import CACHE_LINE, CommitWord, Word, fence, round_up, sleep_on, wake
from apportion.comm.world import World
from apportion.parallel.averaging.contribution import Contribution, ReplicaTensors, average, copy_parts
from apportion.parallel.averaging.rounds import AveragingRound, Exchange, Write, assigned_round, is_late

SLEEP_SECONDS = 0.01
"""The seconds between two looks at what may have ended the wait."""
LINE = 3 * CACHE_LINE
"""The bytes of a slot's own words and numbers."""
_WORDS = 12
_COMMIT, _READY, _LOCK, _HEAD = 0, 4, 64, 64 + LOCK_BYTES
_WRITTEN, _ARRIVED, _ASSIGNED, _SOURCE, _TOOK, _FIRST, _STRIDE, _COUNT = range(8)
"""Words of a slot: contributions written; the average it waits for; ``_WRITTEN`` when it was given its batches (while
they are equal, it has them still to do); the version that handed them out; the last such version whose average it has
taken; and the batches: first, stride and number."""
_BEGAN, _SECONDS, _EXAMPLES = range(3)
"""Numbers of a slot: when it began its round; the seconds that the last one took; the examples that its contribution is
from."""
_DONE, _HANDED_OUT, _TURNED = range(3)
"""Words of a version: batches handed out before it; handed out by now; when it was made (a floating number)."""
_MERGED, _FRESH, _ROW_FIRST, _ROW_STRIDE, _ROW_COUNT = range(5)
"""Words of a version for each slot: the contributions in it; whether batches were given to the slot in this
version (1) or before (0); and the batches: first, stride and number, ``_NONE`` where it has to ask."""
_NONE = -1
_LEFT = 1 << 40
"""The value of ``_ARRIVED`` for a slot that waits for nothing any more."""


def can_share(world: World) -> bool:
    """Return whether a supervisor holds memory for all replicas."""
    return world.channel is not None and world.slots > 1 and world.local_size == world.size and sys.platform == "linux"


@final
class SharedAverage(Exchange):
    """An exchange among the replicas of one host."""

    def __init__(self, frame: ReplicaTensors, world: World, *, every: int, total: int) -> None:
        slots, nbytes = world.slots, frame.nbytes
        meta = 8 * 8 + 8 * 5 * slots
        begin = _HEAD + LINE * slots + 2 * meta
        tensors = round_up(begin)
        memory = world.shared(f"local_sgd/{nbytes}", tensors + (2 + slots) * nbytes)
        self._memory, self._frame, self._every, self._total = memory, frame, every, total
        self._version = Word.from_buffer(memory, _COMMIT)
        self._commit, self._ready = CommitWord(self._version), CommitWord(Word.from_buffer(memory, _READY))
        lines = np.frombuffer(memory, np.int64, LINE // 8 * slots, _HEAD).reshape(slots, -1)
        self._words, self._numbers = lines[:, :_WORDS], lines.view(np.float64)[:, _WORDS:]
        versions = np.frombuffer(memory, np.int64, 2 * meta // 8, _HEAD + LINE * slots).reshape(2, -1)
        self._heads, self._rows = versions[:, :8], versions[:, 8:].reshape(2, 5, slots)
        self._times = versions.view(np.float64)[:, _TURNED]
        places = [frame.contribution_in(memory, tensors + i * nbytes) for i in range(2 + slots)]
        self._averages, self._slots = places[:2], places[2:]
        self._lock: Lock | None = None
        self._waited = 0.0
        self.join(world)
        if world.under_way:
            self._words[self._slot, _ARRIVED] = 0  # it was another process's
            self._numbers[self._slot, _SECONDS] = 0.0

    def join(self, world: World) -> None:
        """Take this process's place among the others."""
        self._world, self._slot, self._group = world, world.slot, world.group()
        self._table = world.members.slots_by_rank() if world.members is not None else list(range(world.size))

    def _own_word(self, number: int) -> CommitWord:
        """Return one of the words of this process's own slot, which the others read."""
        return CommitWord(ctypes.c_int64.from_buffer(self._memory, _HEAD + LINE * self._slot + 8 * number))

    @property
    def has_average(self) -> bool:
        """Tells whether there is an average to go on from."""
        return self._ready.read() != 0

    @property
    def waited(self) -> float:
        return self._waited

    # Beginning

    def start(self, first: Contribution, done: int, unpushed: Sequence[int] = ()) -> None:
        self._group.barrier()
        if self._world.rank == 0:
            if not self._ready.read():
                initialize(self._memory, _LOCK)
            self._ready.withdraw()  # a death in the middle leaves nothing to go on from
            version = self._commit.read() + 1
            copy_parts(first, self._averages[version % 2])
            self._rows[:] = self._words[:] = self._numbers[:] = 0
            self._words[:, _ASSIGNED] = _NONE
            self._hand_out(version, done, self._table)
            self._times[version % 2] = time.monotonic()
            self._commit.publish(version)
            self._ready.publish(1)
        self._group.barrier()

    def _hand_out(self, version: int, done: int, present: list[int]) -> None:
        """Hand out the next batches to the slots that are present, in the order of their ranks; the others ask when
        they come."""
        head, rows = self._heads[version % 2], self._rows[version % 2]
        rows[_ROW_COUNT], rows[_FRESH] = _NONE, 0
        for index, slot in enumerate(present):
            given = assigned_round(done, index, len(present), self._every, self._total)
            rows[_FRESH:, slot] = 1, given.first, given.stride, given.batch_count
        head[_DONE] = done
        head[_HANDED_OUT] = min(self._total, done + self._every * len(present))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock, and yield the number of the last version, which stays the last one meanwhile."""
        if self._lock is None:
            self._lock = Lock(self._memory, _LOCK)
        failed = self._lock.wait(self._world.check)
        if failed and self._lock.is_orphan(failed):
            # Repaired first: a death in the middle of it leaves the lock orphaned, and the next process repairs again.
            self._repair()
            self._lock.adopt()
        try:
            yield self._commit.read()
        finally:
            self._lock.release()

    def _repair(self) -> None:
        """Repair the counts after the lock's holder died. The commit word says which version is whole; but batches of
        that version may have been given to a slot and not yet counted as handed out."""
        head = self._heads[self._commit.read() % 2]
        for line in self._words:
            if line[_ASSIGNED] == line[_WRITTEN] and line[_FIRST] == head[_HANDED_OUT]:
                head[_HANDED_OUT] += line[_COUNT]

    # A round

    def next_round(self, into: Contribution) -> AveragingRound:
        line = self._words[self._slot]
        with self._locked() as version:
            if line[_ASSIGNED] != line[_WRITTEN]:
                self._assign(version)
            line[_TOOK] = line[_SOURCE]
            copy_parts(self._averages[version % 2], into)
            done = int(self._heads[version % 2, _DONE])
        self._numbers[self._slot, _BEGAN] = time.monotonic()
        return AveragingRound(done, int(line[_FIRST]), int(line[_STRIDE]), int(line[_COUNT]))

    def _assign(self, version: int) -> None:
        """Give the slot the batches of this version; where it has had them, or none were meant for it, the next that
        are not handed out."""
        line, rows, head = self._words[self._slot], self._rows[version % 2], self._heads[version % 2]
        first, stride, count = rows[_ROW_FIRST:, self._slot]
        asks = count == _NONE or line[_TOOK] == version
        if asks:
            first, stride = int(head[_HANDED_OUT]), 1
            count = min(self._every, self._total - first)
        line[_SOURCE], line[_FIRST], line[_STRIDE], line[_COUNT] = version, first, stride, count
        # The word follows the batches that it makes valid, and comes before they count as handed out: _repair() counts
        # those of a process that died in between.
        self._own_word(_ASSIGNED).publish(int(line[_WRITTEN]))
        if asks:
            head[_HANDED_OUT] = first + count

    def contribute(self, write: Write) -> None:
        line, numbers = self._words[self._slot], self._numbers[self._slot]
        while True:
            with self._locked() as version:
                is_full = bool(line[_WRITTEN] > self._rows[version % 2, _MERGED, self._slot])
            if not is_full:
                if line[_ASSIGNED] != line[_WRITTEN]:
                    return
                numbers[_SECONDS] = max(1e-9, time.monotonic() - numbers[_BEGAN])
                numbers[_EXAMPLES] = write(self._slots[self._slot])
                # The count follows the contribution: a death before leaves the batches to be done again by the next
                # process.
                self._own_word(_WRITTEN).publish(int(line[_WRITTEN]) + 1)
            # Full: of what was just written, or of what the process that had this slot before has left.
            self._own_word(_ARRIVED).publish(version + 1)
            self._wait(version)

    def finish(self) -> None:
        self._words[self._slot, _ARRIVED] = _LEFT

    def stop(self) -> bool:
        with self._locked() as version:
            # Where one has left before the last round, another may leave within it.
            goes_on = self._is_last(version) and not (self._words[self._table, _ARRIVED] == _LEFT).any()
            if not goes_on:
                self.finish()
        return not goes_on

    def _is_last(self, version: int) -> bool:
        return bool(self._heads[version % 2, _HANDED_OUT] >= self._total)

    def _wait(self, version: int) -> None:
        """Wait until there is a newer average; make it where that is possible."""
        began, waiting = time.perf_counter(), self._group.waiting
        try:
            while self._commit.read() == version:
                self._world.check()
                if self._may_average(version):
                    self._average_if_possible(version)
                else:
                    if waiting is not None:
                        waiting[0] = 1
                    sleep_on(self._version, version, SLEEP_SECONDS)
        finally:
            if waiting is not None:
                waiting[0] = 0
            ended = time.perf_counter()
            self._group.waits.append((began, ended))
            self._waited += ended - began

    # The next average

    def _may_average(self, version: int) -> bool:
        """Return whether all replicas have come that the next average waits for."""
        is_last = self._is_last(version)
        # The last one is everybody's. Who was late for the one before, and has not come since, is not waited for again.
        awaited = [s for s in self._table if is_last or self._rows[version % 2, _FRESH, s]]
        missing = [s for s in awaited if self._words[s, _ARRIVED] <= version]
        if is_last or not missing:
            return not missing
        rounds = [float(s) for s in self._numbers[self._table, _SECONDS] if s]
        now, turned = time.monotonic(), float(self._times[version % 2])
        took = [now - max(turned, float(self._numbers[slot, _BEGAN])) for slot in missing]
        known = all(self._numbers[slot, _SECONDS] for slot in missing)  # a first round has no measure
        return known and all(is_late(seconds, rounds) for seconds in took)

    def _average_if_possible(self, version: int) -> None:
        with self._locked() as last:
            # Asked again: another replica may have made the average while this one waited for the lock.
            if last == version and self._may_average(version):
                self._average(version)
        wake(self._version)

    def _average(self, version: int) -> None:
        """Make the next version, from every contribution that is there."""
        live, new = version % 2, (version + 1) % 2
        written, merged = self._words[:, _WRITTEN].copy(), self._rows[live, _MERGED]
        full = np.flatnonzero(written > merged).tolist()
        # The counts were read first, so that each contribution that they count is read whole.
        fence()
        given = [(float(self._numbers[slot, _EXAMPLES]), self._slots[slot]) for slot in full]
        total = sum(weight for weight, _ in given)
        average(self._frame, self._averages[live], self._averages[new], given, total)
        unseen = [
            s for s in self._table if self._words[s, _TOOK] < version and self._rows[live, _ROW_COUNT, s] != _NONE
        ]
        present = [s for s in self._table if self._words[s, _ARRIVED] == version + 1 and s not in unseen]
        self._hand_out(version + 1, int(self._heads[live, _HANDED_OUT]), present)
        for slot in unseen:  # the batches that it was handed are still its own
            self._rows[new, _ROW_FIRST:, slot] = self._rows[live, _ROW_FIRST:, slot]
        self._rows[new, _MERGED] = merged
        self._rows[new, _MERGED, full] = written[full]
        self._times[new] = time.monotonic()
        # Last of all: a death before it leaves the old version, and the next holder of the lock makes this one anew.
        self._commit.publish(version + 1)
