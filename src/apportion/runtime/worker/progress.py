"""The progress of a rank: a line of numbers in memory that the rank writes and its supervisor reads.

A line outlives its rank's process: a worker that replaces another goes on with what that one has left there.
"""

from __future__ import annotations

from typing import Any, Self, final, overload

import numpy as np

WORDS = 8
"""The number of int64 words in a line, which is a cache line by itself."""
NBYTES = 8 * WORDS


@final
class _Word:
    """One word of a line, read and written as an attribute of ``Progress``."""

    def __init__(self, index: int) -> None:
        self.index = index

    @overload
    def __get__(self, line: None, owner: type) -> Self: ...

    @overload
    def __get__(self, line: Progress, owner: type) -> int: ...

    def __get__(self, line: Progress | None, owner: type) -> Self | int:
        return self if line is None else int(line.words[self.index])

    def __set__(self, line: Progress, value: int) -> None:
        # An aligned store of 8 bytes is not torn on the processors that torch supports, so no lock is needed.
        line.words[self.index] = value


@final
class Progress:
    """The line of one rank. On the class an attribute is the place of its word: ``Progress.step.index``."""

    __slots__ = ("words",)

    beats = _Word(0)
    """Grows with everything that the rank gets done; a rank whose beats stand still may be stuck."""
    waiting = _Word(1)
    """1 while the rank waits for others."""
    step = _Word(2)
    """The number of updates that the rank has seen made."""
    begun = _Word(3)
    """1 once the rank is in its loop."""
    saved_at = _Word(4)
    """The time when the ranks last agreed to save, by ``time.monotonic_ns()``; 0: never."""
    started = _Word(5)
    """1 once rank 0 has reported the start of the run."""

    def __init__(self, words: Any = None) -> None:
        """Wraps ``words``: int64 of shape (WORDS,); None: a line that no other process reads."""
        self.words = np.zeros(WORDS, dtype=np.int64) if words is None else words

    @classmethod
    def of_slot(cls, memory: Any, slot: int) -> Self:
        """Returns the line with this number in memory that holds one line after the other."""
        return cls(lines(memory)[slot])

    @property
    def waiting_word(self) -> Any:
        """The memory of ``waiting``, of shape (1,), for the code that sets it while it waits."""
        return self.words[type(self).waiting.index :][:1]


def lines(memory: Any) -> Any:
    """Returns memory of whole lines as int64 of shape (lines, WORDS), not copied."""
    return np.frombuffer(memory, dtype=np.int64).reshape(-1, WORDS)
