"""A word of shared memory that tells which data are whole, and the order of memory that makes it true.

::

    writer   the data | fence | the word
    reader   the word | fence | the data          whoever has read the word finds what was written before it

A process that dies before it has written the word leaves what the word tells of as it was.
"""

from __future__ import annotations

import ctypes
from typing import final

from apportion.comm.sync import Word, fence


@final
class CommitWord:
    """A word whose value is written after the data that it tells of, and read before them."""

    __slots__ = ("_word",)

    def __init__(self, word: Word | ctypes.c_int64) -> None:
        self._word = word

    def publish(self, number: int) -> None:
        """Write the word: everything that this process has written so far is there for those that read it."""
        fence()
        self._word.value = number

    def read(self) -> int:
        """Read the word: what is read from now on is at least as new."""
        number = self._word.value
        fence()
        return number

    def withdraw(self) -> None:
        """Set the word to 0 before anything else is written: nobody takes what comes next for whole."""
        self._word.value = 0
        fence()

    def is_still(self, number: int) -> bool:
        """Return whether the word has this value after the data have been read: then none of them is newer."""
        fence()
        return self._word.value == number
