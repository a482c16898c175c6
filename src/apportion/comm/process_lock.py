"""A lock in shared memory that survives the death of its holder.

glibc's robust mutex (pthread_mutexattr_setrobust): the kernel keeps a list of what each thread holds, and the next one
to ask gets the lock of a dead holder, and is informed. Taking and releasing it costs 0.3 us, half of what a POSIX lock
on a byte of the file does; one that is free is taken without a system call.
"""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from collections.abc import Callable
from functools import partial

from apportion.comm.sync import CACHE_LINE, Timespec
from apportion.errors import ApportionError, PeerLost

LOCK_BYTES = CACHE_LINE
"""The bytes of one lock: a cache line."""
LOOK_SECONDS = 0.05
"""The seconds between two looks at what may have ended the wait."""
DEADLINE_SECONDS = 120.0
"""The deadline of a wait in seconds. A lock is held for microseconds: after this its holder is stopped, not slow."""
_SHARED = _ROBUST = 1
_MONOTONIC = 1


def _load() -> tuple[ctypes.CDLL, ctypes.PyDLL] | None:
    """The C library, once for calls that wait and once for calls that do not: those need not let other threads run."""
    if sys.platform != "linux":
        return None
    waits, instant = ctypes.CDLL(None), ctypes.PyDLL(None)
    return (waits, instant) if hasattr(waits, "pthread_mutex_clocklock") else None


_library = _load()


def initialize(memory: memoryview, offset: int) -> None:
    """Make a free lock of these ``LOCK_BYTES``; by one process, before any other looks at them."""
    if _library is None:
        raise ApportionError(
            "a parameter store needs the robust locks of glibc 2.30 or newer, on Linux: elsewhere use data_parallel"
        )
    waits, _ = _library
    attributes = ctypes.create_string_buffer(64)
    mutex = (ctypes.c_char * LOCK_BYTES).from_buffer(memory, offset)
    for failed in (
        waits.pthread_mutexattr_init(attributes),
        waits.pthread_mutexattr_setpshared(attributes, _SHARED),
        # Without robustness the death of a holder would leave the lock taken for ever. The kernel walks the list of a
        # thread that ends and marks what it held.
        waits.pthread_mutexattr_setrobust(attributes, _ROBUST),
        waits.pthread_mutex_init(mutex, attributes),
    ):
        if failed:
            raise ApportionError(f"no lock could be made in shared memory: {errno.errorcode.get(failed, failed)}")


class Lock:
    """A lock, seen from a process. It belongs to the thread that takes it."""

    __slots__ = ("_address", "_memory", "attempt", "release")

    def __init__(self, memory: memoryview, offset: int) -> None:
        assert _library is not None, "initialize() has refused"
        instant = _library[1]
        self._memory = (ctypes.c_char * LOCK_BYTES).from_buffer(memory, offset)  # keeps the mapping
        self._address = ctypes.c_void_p(ctypes.addressof(self._memory))
        self.attempt: Callable[[], int] = partial(instant.pthread_mutex_trylock, self._address)
        """Take the lock where it is free: 0 where that has gone well, else see ``is_orphan``. No Python is run in it:
        the store does this millions of times."""
        self.release: Callable[[], int] = partial(instant.pthread_mutex_unlock, self._address)
        """Release the lock; by the thread that took it."""

    def is_orphan(self, failed: int) -> bool:
        """Tell after an attempt that has not gone well whether the holder is dead. Then the lock is this one's, which
        has to see to what the dead one has left behind, and then to ``adopt`` it."""
        if failed == errno.EBUSY:
            return False
        assert failed == errno.EOWNERDEAD, errno.errorcode.get(failed, failed)
        return True

    def adopt(self) -> None:
        """Declare that everything is in order again. A process that dies before this leaves an orphan once more."""
        assert _library is not None
        # Released without this call, the mutex becomes ENOTRECOVERABLE, and no process could ever take it again.
        _library[1].pthread_mutex_consistent(self._address)

    def wait(self, check: Callable[[], None] = lambda: None) -> int:
        """Take the lock as soon as it is free: 0, or that its last holder is dead (see ``is_orphan``). ``check()``
        raises where waiting has become pointless. PeerLost where the holder lives and does not go on."""
        failed = self.attempt()
        return self._wait(check) if failed == errno.EBUSY else failed

    def _wait(self, check: Callable[[], None]) -> int:
        assert _library is not None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            until = time.monotonic() + LOOK_SECONDS
            # By the monotonic clock: a deadline of pthread_mutex_timedlock is of the wall clock, which may be set back.
            limit = Timespec(int(until), int(until % 1 * 1e9))
            failed = _library[0].pthread_mutex_clocklock(self._address, _MONOTONIC, ctypes.byref(limit))
            if failed != errno.ETIMEDOUT:
                return int(failed)
            # Between two short waits and not in the C call: a supervisor may have ended the generation meanwhile.
            check()
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"a lock of the parameter store was held for {DEADLINE_SECONDS:.0f} s: is a worker stopped?"
                )
