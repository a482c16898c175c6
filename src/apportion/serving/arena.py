"""Memory that the server and one member's process share: large tensors lie in it, and only where they lie is sent.

The server gives out ranges and takes them back; the member reads its inputs there and writes its outputs over them, so
a range has one writer at a time. The memory is a file without a name: it goes with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from bisect import insort

from apportion.comm.channel import memory_file

ALIGNED = 64
"""Bytes: ranges begin on cache lines."""


class Arena:
    """``descriptor``: None makes the memory, of so many bytes; else it is mapped."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor = memory_file("apportion-serve") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, nbytes)
        self._map = mmap.mmap(self.descriptor, nbytes)
        self.memory = memoryview(self._map)
        self._free = [(0, nbytes)]

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """A range (offset, bytes) of at least so many; None where there is none left."""
        wanted = -(-nbytes // ALIGNED) * ALIGNED
        for place, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[place : place + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                return offset, wanted
        return None

    def give_back(self, taken: tuple[int, int]) -> None:
        """A range that was taken."""
        insort(self._free, taken)
        merged = [self._free[0]]
        for offset, size in self._free[1:]:
            before, length = merged[-1]
            if before + length == offset:
                merged[-1] = (before, length + size)
            else:
                assert before + length < offset, "a range was given back twice"
                merged.append((offset, size))
        self._free = merged

    @property
    def free(self) -> int:
        """Bytes."""
        return sum(size for _, size in self._free)

    def close(self) -> None:
        """The mapping stays as long as arrays lie in it."""
        os.close(self.descriptor)
        try:
            self.memory.release()
            self._map.close()
        except BufferError:  # an array still lies in it; it goes with that
            pass
