"""The messages between the server and a member's process: frames of a fixed head, tensors' heads, and their bytes.

::

    head     bytes that follow, kind, tensors, number of the work, absolute deadline
    tensor   datatype, dims, where its bytes are, how many, the dims themselves          (for each)
    bytes    of the tensors that do not lie in shared memory, one after the other
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from apportion.serving.pool.shared_arena import Arena, Lease
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
