"""The membership of a run: a page of shared memory that the supervisor writes and every worker of the host looks at.

A worker has a slot, a line of the page, for as long as it lives; its rank is what the table gives that slot. The
generation is even while the table holds and odd while the supervisor changes it. What a worker waits for belongs to
one generation: once another one has begun, its waits raise MembershipChanged, and it asks for its place anew.

In a run on several hosts each has a page, which its agent writes: it says which of all ranks are this host's, and where
the ranks of all hosts meet.

The order of a change (any other loses a worker): the dead are reaped; the generation becomes odd; every survivor
acknowledges it, or is ended and reaped; the table is written; the generation becomes even.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from apportion.comm.sync import CACHE_LINE, CommitWord, Word, fence, sleep_on, wake
from apportion.errors import MembershipChanged, PeerLost

NO_RANK = -1
_WORDS = CACHE_LINE // 4
_GENERATION, _SIZE, _ENDING, _TICKS, _FIRST, _HERE, _PORT, _LENGTH, _BEGAN, _SAVED = range(10)
_RANK, _ACKNOWLEDGED, _PID = 0, 1, 2
_LOOK_SECONDS = 0.05
_TICK_SECONDS = 1.0
"""The longest time in seconds between two ticks of a supervisor that runs: where it takes longer, it was stopped, or
its machine was."""


@dataclass(frozen=True)
class MemberPlace:
    """The place that the table gives a slot."""

    rank: int
    size: int
    generation: int
    local_rank: int
    """The rank's place among those of its host."""
    local_size: int
    """The number of ranks of its host."""
    meeting: tuple[str, int] | None
    """The address and the port where the ranks of several hosts meet; None: all are on one host."""
    began: int = 0
    """The generation in which the training began, or was begun again from its last checkpoint."""
    saved: bool = False
    """True where there is a checkpoint to begin again from, on some host."""


@dataclass(frozen=True)
class HostShare:
    """The part that one host has in a run on several hosts."""

    first: int
    """The first rank of this host."""
    size: int
    """The number of ranks of all hosts."""
    address: str
    """The address of the host of rank 0, where the ranks meet."""
    port: int


class Membership:
    """The page, as the supervisor or a worker sees it. ``memory``: ``nbytes(slots)`` bytes, zeros at first; ``ranks``:
    the number of ranks of the run while none is lost, on all hosts, where it is known."""

    def __init__(self, memory: memoryview, slots: int, ranks: int = 1) -> None:
        self.slots, self.ranks = slots, ranks
        self._address = memoryview(memory)[CACHE_LINE * (slots + 1) :]
        self._words = (Word * (_WORDS * (slots + 1))).from_buffer(memory)
        self._generation = Word.from_buffer(memory, 4 * _GENERATION)
        self._table = CommitWord(self._generation)

    @staticmethod
    def nbytes(slots: int) -> int:
        return CACHE_LINE * (slots + 2)

    @property
    def generation(self) -> int:
        """The generation of the table. Even: the table holds. Odd: it is being changed."""
        return self._generation.value

    def _at(self, slot: int, word: int) -> int:
        return (slot + 1) * _WORDS + word

    def place(self, slot: int) -> MemberPlace:
        """The place of a slot, while the generation is even."""
        rank, words = self._words[self._at(slot, _RANK)], self._words
        meeting = None
        if words[_LENGTH]:
            meeting = bytes(self._address[: words[_LENGTH]]).decode("ascii", "replace"), words[_PORT]
        return MemberPlace(
            rank, words[_SIZE], self.generation,
            local_rank=rank - words[_FIRST], local_size=words[_HERE], meeting=meeting, began=words[_BEGAN],
            saved=bool(words[_SAVED]),
        )  # fmt: skip

    def slots_by_rank(self) -> list[int]:
        """The slot of each rank of this host, in the order of the ranks."""
        ranks = [self._words[self._at(slot, _RANK)] for slot in range(self.slots)]
        first = self._words[_FIRST]
        return [ranks.index(rank) for rank in range(first, first + self._words[_HERE])]

    @property
    def ending(self) -> bool:
        """Is the run to end with the last update that is whole?"""
        return bool(self._words[_ENDING])

    def pid(self, slot: int) -> int:
        """The id of the process that has taken the slot."""
        return self._words[self._at(slot, _PID)]

    # The supervisor's side

    def begin(self, share: HostShare | None = None) -> None:
        """Write the first table: every slot is taken, rank i on slot i, or from the first rank of this host on."""
        self._write(range(self.slots), share)

    def tick(self) -> None:
        """Tell that the supervisor runs: only time in which it does counts for those that wait for it."""
        self._words[_TICKS] = (self._words[_TICKS] + 1) & 0x7FFFFFFF

    def open_change(self, generation: int | None = None) -> int:
        """Begin a change of the table, and return the odd generation that survivors have to acknowledge, also where
        they have acknowledged one that was not closed. ``generation``: that number, where hosts agree on it."""
        self._generation.value = self.generation + 1 + self.generation % 2 if generation is None else generation
        # The odd generation is seen before any line of the table changes, so that a worker which reads a mixture finds
        # that its generation is over.
        fence()
        wake(self._generation)
        return self.generation

    def acknowledged(self, slot: int) -> bool:
        """Has this slot's worker left everything that belongs to an older generation?"""
        return self._words[self._at(slot, _ACKNOWLEDGED)] == self.generation

    def close_change(
        self,
        slots: Iterable[int],
        *,
        ending: bool = False,
        share: HostShare | None = None,
        began: int = 0,
        saved: bool = False,
    ) -> None:
        """Write the new table: rank i has the i-th of these slots, counted from the first rank of this host.
        ``ending``: they are to save, and to leave. ``share``: what this host has in a run on several. ``began``: the
        generation in which the training began, or begins now. ``saved``: there is a checkpoint of it."""
        self._write(slots, share)
        self._words[_BEGAN], self._words[_SAVED] = began, int(saved)
        self._words[_ENDING] = int(ending)
        # Last of all: who reads the even generation finds the whole table. A supervisor that dies before leaves an odd
        # generation, by which no worker begins.
        self._table.publish(self.generation + 1)
        wake(self._generation)

    def _write(self, slots: Iterable[int], share: HostShare | None) -> None:
        order = list(slots)
        first, size = (0, len(order)) if share is None else (share.first, share.size)
        for slot in range(self.slots):
            self._words[self._at(slot, _RANK)] = first + order.index(slot) if slot in order else NO_RANK
        self._words[_SIZE], self._words[_FIRST], self._words[_HERE] = size, first, len(order)
        address = b"" if share is None else share.address.encode("ascii")
        self._address[: len(address)] = address
        self._words[_LENGTH], self._words[_PORT] = len(address), 0 if share is None else share.port

    # A worker's side

    def occupy(self, slot: int) -> None:
        """Take the slot for this process."""
        self._words[self._at(slot, _PID)] = os.getpid()

    def check(self, generation: int) -> None:
        """Raise MembershipChanged where that generation is over."""
        if self._generation.value != generation:
            raise MembershipChanged(f"generation {generation} is over")

    def await_change(self, generation: int, seconds: float) -> bool:
        """Wait at most this many seconds until that generation is over, and return whether it is."""
        end = time.monotonic() + seconds
        while self._generation.value == generation:
            left = end - time.monotonic()
            if left <= 0:
                return False
            sleep_on(self._generation, generation, min(left, _TICK_SECONDS))
        return True

    def rejoin(self, slot: int, seconds: float) -> MemberPlace:
        """Acknowledge the change, wait for the new table, and return this slot's place in it. PeerLost where the
        supervisor has run for this many seconds without coming to an end, or has given the slot away."""
        left, ticked, ticks = seconds, time.monotonic(), self._words[_TICKS]
        while True:
            generation = self._table.read()
            if generation % 2 == 0:
                place = self.place(slot)
                # The supervisor may have opened the next change while the line was read (the reader's side of a
                # seqlock).
                if self._table.is_still(generation):
                    if place.rank == NO_RANK:
                        raise PeerLost(f"the run goes on without the worker on slot {slot}")
                    return place
                continue
            # Written again in each turn: a further change may have been opened, which has a generation of its own.
            self._words[self._at(slot, _ACKNOWLEDGED)] = generation
            if ticks != self._words[_TICKS] or not ticks:  # a supervisor that never ticks is not known to be stopped
                before, ticked, ticks = ticked, time.monotonic(), self._words[_TICKS]
                left -= min(ticked - before, _TICK_SECONDS)
            if left <= 0:
                raise PeerLost(f"the supervisor did not say within {seconds:.0f} s who is in the run")
            sleep_on(self._generation, generation, _LOOK_SECONDS)
