"""The messages between the server and a member's process: frames of a fixed head, tensors' heads, and their bytes.

::

    head     bytes that follow, kind, tensors, number of the work, absolute deadline
    tensor   datatype, dims, where its bytes are, how many, the dims themselves          (for each)
    bytes    of the tensors that do not lie in shared memory, one after the other
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from apportion.comm.channel import memory_file
from apportion.comm.sync import round_up
from apportion.serving.protocol.datatypes import DATATYPES, Array, from_bytes, to_bytes

# Little-endian and without implicit padding ("<"): 24 bytes, so that a tensor's head, of 24 bytes as well, and the dims
# after it stay aligned to 8 bytes. The length covers what follows the head, not the head itself.
_HEAD = struct.Struct("<IBxHQd")
_TENSOR = struct.Struct("<BBxxxxxxqQ")
_DATATYPES = tuple(DATATYPES)
_CODES = {name: code for code, name in enumerate(_DATATYPES)}
HEAD_BYTES = _HEAD.size
ALIGNED = 8
"""The alignment in bytes at which each tensor in a frame begins."""
ROOM = 1 << 16
"""The number of bytes that are received at once."""
INLINE_BYTES = 32 << 10
"""The size in bytes up to which a tensor is sent; a larger one lies in shared memory."""
INLINE = -1
"""The offset that says that a tensor's bytes are in the frame itself; any other is an offset in the shared memory."""


class Kind(IntEnum):
    """The kind of a frame."""

    RUN = 1
    """A batch for a member's process: these inputs, until this deadline."""
    DONE = 2
    """A reply of the process: these are the outputs."""
    EXPIRED = 3
    """A reply of the process: the deadline passed before or while it computed."""
    REFUSED = 4
    """A reply of the process: the model does not take these inputs; text says why."""
    FAILED = 5
    """A reply of the process: the outputs could not be computed; text says why."""
    CONTROL = 6
    """A message in either direction: JSON that does not belong to a single request."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in a frame. ``offset``: where its bytes already lie in shared memory; None where they are sent."""

    datatype: str
    array: Array
    offset: int | None = None


def placed(
    tensors: Iterable[tuple[str, Array]], inbox: Arena, held: Sequence[Lease] = ()
) -> tuple[list[Placed], list[Lease]]:
    """Return (the tensors as they are sent, the leases of the memory they lie in) for (datatype, array) pairs: large
    ones lie in the inbox already, ``held`` by these leases, or are copied there; where the inbox is full they
    are sent as they are."""
    found, leases = [], [*held]
    for datatype, array in tensors:
        offset = inbox.offset(array) if held and datatype != "BYTES" else None
        if offset is None and array.nbytes > INLINE_BYTES and datatype != "BYTES" and (copy := inbox.copied(array)):
            array, offset = copy[0], inbox.offset(copy[0])
            leases.append(copy[1])
        found.append(Placed(datatype, array, offset))
    return found, leases


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was received."""

    kind: Kind
    number: int
    deadline: float
    tensors: tuple[Placed, ...]
    text: bytes = b""


def encode(kind: Kind, number: int, deadline: float, tensors: Sequence[Placed] = (), text: bytes = b"") -> bytes:
    """Return a whole frame as bytes. ``text`` is given only where there are no tensors."""
    heads, bodies = [], []
    for tensor in tensors:
        shape = tensor.array.shape
        if tensor.offset is None:
            body = to_bytes(tensor.array, tensor.datatype)
            size, offset = len(body), INLINE
            # Each body is padded to a multiple of 8 bytes: numpy reads the next one in place, and an unaligned array
            # would have to be copied. The size that is sent is that without the padding.
            bodies += [body, b"\0" * (-size % ALIGNED)]
        else:
            size, offset = tensor.array.nbytes, tensor.offset
        heads.append(_TENSOR.pack(_CODES[tensor.datatype], len(shape), offset, size))
        heads.append(struct.pack(f"<{len(shape)}q", *shape))
    rest = b"".join([*heads, *bodies, text])
    return _HEAD.pack(len(rest), kind, len(tensors), number, deadline) + rest


def rest_of(buffer: bytes | bytearray | memoryview, at: int = 0) -> int:
    """Return how many bytes follow the frame's head that is here."""
    return int(_HEAD.unpack_from(buffer, at)[0])


def decode(frame: memoryview, shared: memoryview) -> Frame:
    """Decode a whole frame. Arrays are views of the frame, or of the shared memory."""
    _, kind, count, number, deadline = _HEAD.unpack_from(frame)
    at, found = _HEAD.size, []
    for _ in range(count):
        code, dims, offset, size = _TENSOR.unpack_from(frame, at)
        at += _TENSOR.size
        found.append((_DATATYPES[code], struct.unpack_from(f"<{dims}q", frame, at), offset, size))
        at += 8 * dims
    tensors = []
    for datatype, shape, offset, size in found:
        if offset == INLINE:
            # Only bodies that are in the frame advance the position: a tensor in shared memory has no bytes here.
            data, at = frame[at : at + size], at + size + -size % ALIGNED
        else:
            data = shared[offset : offset + size]
        array: np.ndarray[Any, Any] = from_bytes(data, datatype, math.prod(shape)).reshape(shape)
        tensors.append(Placed(datatype, array, None if offset == INLINE else offset))
    return Frame(Kind(kind), number, deadline, tuple(tensors), bytes(frame[at:]) if not count else b"")


class Reader:
    """A reader of frames out of a stream: bytes are received into ``room``, as much as there is, then ``advance`` is
    called with their number."""

    def __init__(self) -> None:
        self._buffer, self._end = bytearray(ROOM), 0

    @property
    def room(self) -> memoryview:
        """The memory to receive into, which is never empty."""
        return memoryview(self._buffer)[self._end :]

    def advance(self, nbytes: int) -> list[memoryview]:
        """Return the frames that are complete after ``nbytes`` more bytes."""
        self._end += nbytes
        whole, at = [], 0
        while self._end - at >= HEAD_BYTES:
            size = HEAD_BYTES + rest_of(self._buffer, at)
            if self._end - at < size:
                # The frame cannot fit: the buffer grows to exactly its size, so that the following receives end at its
                # last byte and nothing is moved again. A frame that fits is completed where it is.
                if size > len(self._buffer):
                    self._buffer = self._buffer[at : self._end] + bytearray(size - (self._end - at))
                    at, self._end = 0, self._end - at
                break
            # A copy, since views of the frame outlive this call and the buffer is written again by the next receive.
            whole.append(memoryview(bytes(memoryview(self._buffer)[at : at + size])))
            at += size
        if at:
            self._buffer[: self._end - at] = self._buffer[at : self._end]
            self._end -= at
        # A large frame must not keep its memory for the lifetime of the connection.
        if not self._end and len(self._buffer) > ROOM:
            self._buffer = bytearray(ROOM)
        return whole


# Memory that the server shares with the members' processes: large tensors lie in it, and only where they lie is sent.
#
# One arena holds what requests bring, for all members to read: a body is received into it and copied no more. Its
# ranges are leases, which go back when they are no longer referenced. The memory is a file without a name: it goes
# with the last process that maps it.


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
