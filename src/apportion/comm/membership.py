"""The membership of a run: a page of shared memory that the supervisor writes and every worker of the host looks at.

A worker has a seat, a line of the page, for as long as it lives; its rank is what the table gives that seat. The
generation is even while the table holds and odd while the supervisor changes it. What a worker waits for belongs to
one generation: once another one has begun, its waits raise MembershipChanged, and it asks for its place anew.

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

NOBODY = -1
_WORDS = CACHE_LINE // 4
_GENERATION, _SIZE, _ENDING, _TICKS = 0, 1, 2, 3
_RANK, _ACKNOWLEDGED, _PID = 0, 1, 2
_LOOK_SECONDS = 0.05
_TICK_SECONDS = 1.0
"""The longest time in seconds between two ticks of a supervisor that runs: where it takes longer, it was stopped, or
its machine was."""


@dataclass(frozen=True)
class MemberPlace:
    """The place that the table gives a seat."""

    rank: int
    size: int
    generation: int


class Membership:
    """The page, as the supervisor or a worker sees it. ``memory``: ``nbytes(seats)`` bytes, zeros at first."""

    def __init__(self, memory: memoryview, seats: int) -> None:
        self.seats = seats
        self._words = (Word * (_WORDS * (seats + 1))).from_buffer(memory)
        self._generation = Word.from_buffer(memory, 4 * _GENERATION)
        self._table = CommitWord(self._generation)

    @staticmethod
    def nbytes(seats: int) -> int:
        return CACHE_LINE * (seats + 1)

    @property
    def generation(self) -> int:
        """The generation of the table. Even: the table holds. Odd: it is being changed."""
        return self._generation.value

    def _at(self, seat: int, word: int) -> int:
        return (seat + 1) * _WORDS + word

    def place(self, seat: int) -> MemberPlace:
        """The place of a seat, while the generation is even."""
        return MemberPlace(self._words[self._at(seat, _RANK)], self._words[_SIZE], self.generation)

    def seated(self) -> list[int]:
        """The seat of each rank."""
        ranks = [self._words[self._at(seat, _RANK)] for seat in range(self.seats)]
        return [ranks.index(rank) for rank in range(self._words[_SIZE])]

    @property
    def ending(self) -> bool:
        """Is the run to end with the last update that is whole?"""
        return bool(self._words[_ENDING])

    def pid(self, seat: int) -> int:
        """The id of the process that has taken the seat."""
        return self._words[self._at(seat, _PID)]

    # The supervisor's side

    def begin(self) -> None:
        """Write the first table: every seat is taken, rank i on seat i."""
        self._write(range(self.seats))

    def tick(self) -> None:
        """Tell that the supervisor runs: only time in which it does counts for those that wait for it."""
        self._words[_TICKS] = (self._words[_TICKS] + 1) & 0x7FFFFFFF

    def open_change(self) -> int:
        """Begin a change of the table, and return the odd generation that survivors have to acknowledge, also where
        they have acknowledged one that was not closed."""
        self._generation.value += 1 + self.generation % 2
        fence()
        wake(self._generation)
        return self.generation

    def acknowledged(self, seat: int) -> bool:
        """Has this seat's worker left everything that belongs to an older generation?"""
        return self._words[self._at(seat, _ACKNOWLEDGED)] == self.generation

    def close_change(self, seats: Iterable[int], *, ending: bool = False) -> None:
        """Write the new table: rank i sits on the i-th of these seats. ``ending``: they are to save, and to leave."""
        self._write(seats)
        self._words[_ENDING] = int(ending)
        self._table.publish(self.generation + 1)
        wake(self._generation)

    def _write(self, seats: Iterable[int]) -> None:
        order = list(seats)
        for seat in range(self.seats):
            self._words[self._at(seat, _RANK)] = order.index(seat) if seat in order else NOBODY
        self._words[_SIZE] = len(order)

    # A worker's side

    def sit(self, seat: int) -> None:
        """Take the seat for this process."""
        self._words[self._at(seat, _PID)] = os.getpid()

    def check(self, generation: int) -> None:
        """Raise MembershipChanged where that generation is over."""
        if self._generation.value != generation:
            raise MembershipChanged(f"generation {generation} is over")

    def rejoin(self, seat: int, seconds: float) -> MemberPlace:
        """Acknowledge the change, wait for the new table, and return this seat's place in it. PeerLost where the
        supervisor has run for so many seconds without coming to an end, or has given the seat away."""
        left, ticked, ticks = seconds, time.monotonic(), self._words[_TICKS]
        while True:
            generation = self._table.read()
            if generation % 2 == 0:
                place = self.place(seat)
                if self._table.is_still(generation):
                    if place.rank == NOBODY:
                        raise PeerLost(f"the run goes on without the worker on seat {seat}")
                    return place
                continue
            self._words[self._at(seat, _ACKNOWLEDGED)] = generation
            if ticks != self._words[_TICKS] or not ticks:  # a supervisor that never ticks is not known to be stopped
                before, ticked, ticks = ticked, time.monotonic(), self._words[_TICKS]
                left -= min(ticked - before, _TICK_SECONDS)
            if left <= 0:
                raise PeerLost(f"the supervisor did not say within {seconds:.0f} s who is in the run")
            sleep_on(self._generation, generation, _LOOK_SECONDS)
