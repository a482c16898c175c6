"""What the server and a member's process say to each other: frames of a fixed head, tensors' heads, and their bytes.

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

_HEAD = struct.Struct("<IBxHQd")
_TENSOR = struct.Struct("<BBxxxxxxqQ")
_DATATYPES = tuple(DATATYPES)
_CODES = {name: code for code, name in enumerate(_DATATYPES)}
HEAD_BYTES = _HEAD.size
ALIGNED = 8
"""Bytes: where each tensor in a frame begins."""
ROOM = 1 << 16
"""Bytes that are received at once."""
INLINE_BYTES = 32 << 10
"""Up to here a tensor is sent; a larger one lies in shared memory."""
INLINE = -1
"""Where a tensor's bytes are: in the frame itself; else an offset in the shared memory."""


class Kind(IntEnum):
    """Of a frame."""

    RUN = 1
    """To a member: these inputs, until this deadline."""
    DONE = 2
    """From it: these outputs."""
    EXPIRED = 3
    """From it: the deadline passed before or while it computed."""
    REFUSED = 4
    """From it: these are no inputs for the net; text says why."""
    FAILED = 5
    """From it: they could not be computed; text says why."""
    TOLD = 6
    """Either way: JSON, of what is not one request's."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in a frame. ``offset``: of its bytes in shared memory, where they already lie; None: they are sent."""

    datatype: str
    array: Array
    offset: int | None = None


def placed(
    tensors: Iterable[tuple[str, Array]], inbox: Arena, held: Sequence[Lease] = ()
) -> tuple[list[Placed], list[Lease]]:
    """(datatype, array) as they are sent: large ones lie in the inbox already, ``held`` by these leases, or are copied
    there; where there is no room they are sent as they are."""
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
    """As it was received."""

    kind: Kind
    number: int
    deadline: float
    tensors: tuple[Placed, ...]
    text: bytes = b""


def encode(kind: Kind, number: int, deadline: float, tensors: Sequence[Placed] = (), text: bytes = b"") -> bytes:
    """A frame, whole. ``text`` only where there are no tensors."""
    heads, bodies = [], []
    for tensor in tensors:
        shape = tensor.array.shape
        if tensor.offset is None:
            body = to_bytes(tensor.array, tensor.datatype)
            size, offset = len(body), INLINE
            bodies += [body, b"\0" * (-size % ALIGNED)]
        else:
            size, offset = tensor.array.nbytes, tensor.offset
        heads.append(_TENSOR.pack(_CODES[tensor.datatype], len(shape), offset, size))
        heads.append(struct.pack(f"<{len(shape)}q", *shape))
    rest = b"".join([*heads, *bodies, text])
    return _HEAD.pack(len(rest), kind, len(tensors), number, deadline) + rest


def rest_of(buffer: bytes | bytearray | memoryview, at: int = 0) -> int:
    """How many bytes follow the frame's head that is here."""
    return int(_HEAD.unpack_from(buffer, at)[0])


def decode(frame: memoryview, shared: memoryview) -> Frame:
    """A whole frame. Arrays are views: of the frame, or of the shared memory."""
    _, kind, many, number, deadline = _HEAD.unpack_from(frame)
    at, found = _HEAD.size, []
    for _ in range(many):
        code, dims, offset, size = _TENSOR.unpack_from(frame, at)
        at += _TENSOR.size
        found.append((_DATATYPES[code], struct.unpack_from(f"<{dims}q", frame, at), offset, size))
        at += 8 * dims
    tensors = []
    for datatype, shape, offset, size in found:
        if offset == INLINE:
            data, at = frame[at : at + size], at + size + -size % ALIGNED
        else:
            data = shared[offset : offset + size]
        array: np.ndarray[Any, Any] = from_bytes(data, datatype, math.prod(shape)).reshape(shape)
        tensors.append(Placed(datatype, array, None if offset == INLINE else offset))
    return Frame(Kind(kind), number, deadline, tuple(tensors), bytes(frame[at:]) if not many else b"")


class Reader:
    """Frames out of a stream: it is received into ``room``, as much as there is, then ``came`` is told how much."""

    def __init__(self) -> None:
        self._buffer, self._end = bytearray(ROOM), 0

    @property
    def room(self) -> memoryview:
        """Never empty."""
        return memoryview(self._buffer)[self._end :]

    def came(self, nbytes: int) -> list[memoryview]:
        """The frames that are whole now."""
        self._end += nbytes
        whole, at = [], 0
        while self._end - at >= HEAD_BYTES:
            size = HEAD_BYTES + rest_of(self._buffer, at)
            if self._end - at < size:
                if size > len(self._buffer):
                    self._buffer = self._buffer[at : self._end] + bytearray(size - (self._end - at))
                    at, self._end = 0, self._end - at
                break
            whole.append(memoryview(bytes(memoryview(self._buffer)[at : at + size])))
            at += size
        if at:
            self._buffer[: self._end - at] = self._buffer[at : self._end]
            self._end -= at
        if not self._end and len(self._buffer) > ROOM:
            self._buffer = bytearray(ROOM)
        return whole
