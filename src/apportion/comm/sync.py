"""Words of shared memory: waiting for one to change (a short look, then asleep in the kernel until it is woken), and
the order of memory around one that tells which data are whole.

Linux's futex (Drepper, "Futexes Are Tricky", 2011), which works between processes that map the same memory. Elsewhere
the wait is a short sleep, repeated.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time
from typing import final

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 0, 1
_EVERYONE = 1 << 30
_NAP_SECONDS = 0.0002

CACHE_LINE = 64
"""The bytes of a cache line. What different processes write lies on different ones, so that no write slows another."""

Word = ctypes.c_int32
"""Four bytes that lie at a multiple of four."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall if _NUMBER else None
_fence = threading.Lock()
_STRONG = platform.machine() in ("x86_64", "AMD64", "i686")


class Timespec(ctypes.Structure):
    """The C library's ``struct timespec``."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def round_up(nbytes: int, multiple: int = CACHE_LINE) -> int:
    """Return the least multiple that is not below a number of bytes."""
    return -(-nbytes // multiple) * multiple


def sleep_on(word: Word, value: int, seconds: float) -> None:
    """Return when the word is no longer this value, when it was woken, or after this many seconds (or earlier: look at
    the word again)."""
    if _syscall is None:
        time.sleep(min(_NAP_SECONDS, seconds))
        return
    whole = int(seconds)
    limit = Timespec(whole, int((seconds - whole) * 1e9))
    # The kernel compares the word with the value under its own lock before it sleeps: a wake between the look and this
    # call is not lost. The flags have no FUTEX_PRIVATE, since the word lies in memory of several processes. The result
    # is ignored: EAGAIN, EINTR and ETIMEDOUT all mean that the caller looks again.
    _syscall(
        ctypes.c_long(_NUMBER),
        ctypes.byref(word),
        ctypes.c_int(_WAIT),
        ctypes.c_int(value),
        ctypes.byref(limit),
        None,
        ctypes.c_int(0),
    )


def wake(word: Word) -> None:
    """Wake every process that sleeps on the word, so that it looks at the word again."""
    if _syscall is not None:
        _syscall(
            ctypes.c_long(_NUMBER),
            ctypes.byref(word),
            ctypes.c_int(_WAKE),
            # All of them: which of the sleepers waits for this change is not known here.
            ctypes.c_int(_EVERYONE),
            None,
            None,
            ctypes.c_int(0),
        )


def fence() -> None:
    """Order memory: what was written before is seen by a process that sees what is written after; and the same for
    reads. x86 keeps that order by itself; elsewhere taking and releasing a lock twice is a full barrier."""
    if not _STRONG:
        # Acquiring a lock keeps later accesses behind it, and releasing keeps earlier ones before it. One pair alone
        # lets both move into the critical section and pass each other there; after two no access can cross.
        for _ in range(2):
            with _fence:
                pass


def full_fence() -> None:
    """Order memory as ``fence`` does, and keep later reads from overtaking earlier writes, which no processor does by
    itself. One process announces that it sleeps, and then looks once more; another writes, and then looks for sleepers:
    so one of them sees what the other has written."""
    # Unconditional: x86 may also let a read overtake an earlier write to another word (store buffer), which is just
    # what a sleeper and its waker do. The atomic operation of a lock drains that buffer.
    for _ in range(2):
        with _fence:
            pass


@final
class CommitWord:
    """A word whose value is written after the data that it tells of, and read before them.

    ::

        writer   the data | fence | the word
        reader   the word | fence | the data          a reader of the word finds what was written before it

    A process that dies before it has written the word leaves what the word tells of as it was.
    """

    __slots__ = ("_word",)

    def __init__(self, word: Word | ctypes.c_int64) -> None:
        self._word = word

    def publish(self, number: int) -> None:
        """Write the word: everything that this process has written so far is there for those that read it."""
        fence()
        # A plain store of an aligned word is atomic, so that a reader sees the old number or this one, never a mixture.
        self._word.value = number

    def read(self) -> int:
        """Read the word: what is read from now on is at least as new."""
        number = self._word.value
        fence()
        return number

    def withdraw(self) -> None:
        """Set the word to 0 before anything else is written: no reader takes what comes next for whole."""
        self._word.value = 0
        fence()

    def is_still(self, number: int) -> bool:
        """Return whether the word has this value after the data have been read: then none of them is newer."""
        # Without it the second look could be taken before the data were read, and prove nothing (as in a seqlock).
        fence()
        return self._word.value == number
