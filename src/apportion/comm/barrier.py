"""A barrier for the processes of a host: a line of shared memory each, with the number of meetings it has come to. A
waiting process looks for a short while where every process has a core of its own, and is then asleep until it is
woken."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import final

from apportion.comm.group import WaitClock
from apportion.comm.sync import CACHE_LINE, Word, fence, full_fence, sleep_on, wake
from apportion.errors import PeerLost
from apportion.process import is_alive

SPIN_SECONDS = 0.0002
"""The seconds that a rank looks for the others before it sleeps, where each has a core of its own: being woken takes
longer than most waits."""
SLEEP_SECONDS = 0.01
"""The seconds between two looks at what may have ended the wait."""
NAP_SECONDS = 0.0005
"""The seconds between two looks at what may have ended the wait, while messages are under way that only this process
moves on."""
LOOK_SECONDS = 1.0
"""The seconds between two looks at whether the others live, where no supervisor does that."""
DEADLINE_SECONDS = 300.0
"""The deadline of a wait in seconds, where no supervisor finds the rank that is late."""
_RECORDED_WAITS = 8192
_SEQUENCE, _GENERATION, _PID = 0, 1, 2
_HALF = 1 << 31


@final
class Barrier:
    """A barrier at which ranks wait for each other: a line of memory each, with the number of meetings it has come to.

    ``check()`` raises where the wait has become pointless; without it the ranks look after each other, and a wait lasts
    ``deadline`` seconds at most.
    """

    def __init__(  # noqa: PLR0913 (what a meeting is of)
        self,
        memory: memoryview,
        rank: int,
        size: int,
        *,
        generation: int = 0,
        check: Callable[[], None] | None = None,
        spins: bool = True,
        deadline: float = DEADLINE_SECONDS,
        all_waits: WaitClock | None = None,
    ) -> None:
        words = [
            [Word.from_buffer(memory, at * CACHE_LINE + 4 * word) for word in (_SEQUENCE, _GENERATION, _PID)]
            for at in range(size)
        ]
        self.rank, self.size, self._generation, self._check = rank, size, generation, check
        self._own, self._lines = words[rank][_SEQUENCE], words
        self._others = [(at, words[at][_SEQUENCE], words[at][_GENERATION]) for at in range(size) if at != rank]
        self._spin, self._deadline = SPIN_SECONDS if spins else 0.0, deadline
        self._look = min(LOOK_SECONDS, deadline)
        self.number = 0
        self._interrupted = False
        self.waits: deque[tuple[float, float]] = deque(maxlen=_RECORDED_WAITS)
        self.all_waits = WaitClock() if all_waits is None else all_waits
        own, mark, pid = words[rank]
        # The order matters: the mark goes first and comes back last, with fences between, so that a rank which sees
        # this generation sees its own number and not the number that an earlier process of this slot has left.
        mark.value = -1  # a rank that still looks for the number of an older generation does not find one
        fence()
        own.value = 0
        pid.value = os.getpid()
        fence()
        mark.value = generation
        wake(own)

    def interrupt(self) -> None:
        """Has those that wait here stop waiting, with PeerLost, within ``SLEEP_SECONDS``. May be called from any
        thread; no rank meets here any more."""
        self._interrupted = True

    def arrive(self) -> None:
        """Arrive: everything written so far is there for those that have waited for this rank."""
        # The number wraps round at 32 bits; ``_is_there`` compares by the half of the circle that the difference lies
        # in, which is right while no rank is 2**31 meetings ahead.
        self.number = (self.number + 1) % (2 * _HALF)
        fence()
        # Behind the fence: what this rank wrote into its slot must be there for a rank that sees the number.
        self._own.value = self.number
        wake(self._own)

    def wait(self) -> None:
        """Wait until every rank has arrived as often as this one."""
        began = time.perf_counter()
        self.all_waits.move_on()  # whom this rank waits for may wait for that
        for rank, sequence, generation in self._others:
            if not self._is_there(sequence, generation):
                self._wait_for(rank, sequence, generation, began)
        # The numbers were read before; the data that they tell of may only be read after.
        fence()
        ended = time.perf_counter()
        self.waits.append((began, ended))
        self.all_waits.seconds += ended - began

    def __call__(self) -> None:
        self.arrive()
        self.wait()

    def _is_there(self, sequence: Word, generation: Word) -> bool:
        # The generation first: it is written after the number has begun anew, so that number is of this generation.
        if generation.value != self._generation:
            return False
        fence()
        return (sequence.value - self.number) % (2 * _HALF) < _HALF

    def _wait_for(self, rank: int, sequence: Word, generation: Word, began: float) -> None:
        spin_until = began + self._spin
        while time.perf_counter() < spin_until:
            if self._is_there(sequence, generation):
                return
        self._sleep_until(lambda: self._is_there(sequence, generation), rank, sequence, began)

    def until(self, rank: int, word: Word, asleep: Word, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds that may come true when another rank changes a word; that rank wakes only
        processes that say that they sleep."""
        began = time.perf_counter()
        spin_until, seen = began + self._spin, word.value
        try:
            while time.perf_counter() < spin_until:
                if holds():
                    return
                if len(self.all_waits.moving) > 1:  # while it streams in, others do too
                    self.all_waits.move_on()
                if word.value != seen:  # it is at work
                    spin_until, seen = time.perf_counter() + self._spin, word.value
            # Dekker's pattern: this end says that it sleeps and then looks; the other writes and then looks whether one
            # sleeps. The full fences make sure that at least one of them sees the other, so that no wake is missed.
            asleep.value = 1
            full_fence()
            self._sleep_until(holds, rank, word, time.perf_counter())
        finally:
            asleep.value = 0
            self.all_waits.seconds += time.perf_counter() - began

    def _sleep_until(self, holds: Callable[[], bool], rank: int, word: Word, began: float) -> None:
        look, before = began + self._look, word.value
        self.all_waits.begin()
        try:
            while True:
                # Read before the condition: a change after this makes ``sleep_on`` return at once, since the word
                # differs.
                seen = word.value
                if holds():
                    return
                if seen != before:  # it is late, but at work
                    began, before = time.perf_counter(), seen
                if self._interrupted:
                    raise PeerLost(f"rank {self.rank} waits no longer for rank {rank}: it was closed here")
                if self._check is not None:
                    self._check()
                elif time.perf_counter() > look:
                    look = time.perf_counter() + self._look
                    self._look_after(rank, began)
                sleep_on(word, seen, NAP_SECONDS if self.all_waits.move_on() else SLEEP_SECONDS)
        finally:
            self.all_waits.end()

    def _look_after(self, rank: int, began: float) -> None:
        pid = self._lines[rank][_PID].value
        # A pid of 0 is that of a rank which has not begun yet. A pid that the system has given to another process looks
        # alive; then the deadline below ends the wait.
        if pid and not is_alive(pid):
            raise PeerLost(f"rank {self.rank} lost rank {rank}: its process {pid} has ended")
        if time.perf_counter() - began > self._deadline:
            raise PeerLost(f"rank {self.rank} has waited {self._deadline:.0f} s for rank {rank}")
