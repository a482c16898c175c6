"""Memory that the server shares with the members' processes: large tensors lie in it, and only where they lie is sent.

One arena holds what requests bring, for all members to read: a body is received into it and copied no more. Its ranges
are leases, which go back when they are no longer referenced. The memory is a file without a name: it goes with the last
process that maps it.
"""

from __future__ import annotations

import mmap
import os
from bisect import insort
from collections import deque
from typing import Any

import numpy as np

from apportion.comm.channel import memory_file
from apportion.comm.sync import round_up
from apportion.serving.protocol.datatypes import Array


class Lease:
    """A range of the memory, which is taken as long as the lease exists."""

    __slots__ = ("_arena", "_taken", "memory")

    def __init__(self, arena: Arena, taken: tuple[int, int], nbytes: int) -> None:
        self._arena, self._taken = arena, taken
        self.memory = arena.memory[taken[0] : taken[0] + nbytes]

    def __del__(self) -> None:
        self._arena.returned.append(self._taken)  # no more than that: it may be called in the middle of anything


class Arena:
    """A shared memory of which ranges are given out. ``descriptor``: None creates memory of ``nbytes``; otherwise the
    memory of the descriptor is mapped. ``readonly``: other processes read the memory too, and a model that computes in
    place must not change it under them."""

    def __init__(self, nbytes: int, descriptor: int | None = None, *, readonly: bool = False) -> None:
        self.nbytes = nbytes
        self.descriptor = memory_file("apportion-serve") if descriptor is None else descriptor
        if descriptor is None:
            # The file is sparse: pages are committed when they are first written, not here.
            os.ftruncate(self.descriptor, nbytes)
        self._map = mmap.mmap(self.descriptor, nbytes, prot=mmap.PROT_READ | (0 if readonly else mmap.PROT_WRITE))
        self.memory = memoryview(self._map)
        self._begins = _address(np.frombuffer(self.memory, np.uint8))
        self._free = [(0, nbytes)]
        self.returned: deque[tuple[int, int]] = deque()
        """The ranges whose leases no longer exist."""

    def lease(self, nbytes: int) -> Lease | None:
        """Return the lease of a range of ``nbytes``; None where there is none left."""
        taken = self.take(nbytes)
        return None if taken is None else Lease(self, taken, nbytes)

    def offset(self, array: Array) -> int | None:
        """Return the offset at which this array lies in the memory; None where it lies elsewhere."""
        # By address and not by ``array.base``: views of views, and arrays that the protocol made of a body, are found
        # as well. No datatype is stored here by reference, so that an address in the range means the bytes are there.
        at = _address(array) - self._begins
        return at if 0 <= at < self.nbytes else None

    def copied(self, array: Array) -> tuple[Array, Lease] | None:
        """Return (a copy of the array that lies in this memory, its lease); None where the memory is full."""
        if (lease := self.lease(array.nbytes)) is None:
            return None
        there = np.frombuffer(lease.memory, array.dtype).reshape(array.shape)
        np.copyto(there, array)
        return there, lease

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Take a range of at least ``nbytes``, and return (offset, bytes); None where there is none left."""
        # Whole cache lines: two processes that write neighbouring ranges never share a line, and every range begins
        # aligned for numpy.
        wanted = round_up(nbytes)
        self._collect()
        # First fit: requests are short-lived and ranges are merged when they come back, so that the list stays short
        # and a better fit is not worth the search.
        for place, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[place : place + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                return offset, wanted
        return None

    def _collect(self) -> None:
        # ``deque.append`` and ``popleft`` are atomic: a lease may be finalized by the garbage collector in the middle
        # of ``take`` or of another finalizer, which is why ``__del__`` changes nothing else.
        while self.returned:
            self.give_back(self.returned.popleft())

    def give_back(self, taken: tuple[int, int]) -> None:
        """Give back a range that was taken."""
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
        """The number of bytes that are free."""
        self._collect()
        return sum(size for _, size in self._free)

    def close(self) -> None:
        """Close the memory; the mapping stays as long as arrays lie in it."""
        os.close(self.descriptor)
        try:
            self.memory.release()
            self._map.close()
        except BufferError:  # an array still lies in it; it goes with that
            pass


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
