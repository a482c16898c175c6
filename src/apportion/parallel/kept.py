"""The whole state after the last update, in memory that outlives every worker.

::

    word c            version c % 2 is whole
    version 0, 1      length | what lies where (JSON) | tensor | tensor | ...

One rank writes the version that is not live, then the word: a death in the middle leaves the last whole one behind, and
so does the death of all ranks at once. For updates that every rank makes alike, whatever the optimizer keeps; weights
that lie in shared pages need no copy (``shared_update.py``).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.futex import fence
from apportion.strategy import State
from apportion.world import World

ALIGN = 64
"""Bytes that every tensor starts on a multiple of."""
_HEAD_BYTES = 64
_COMMIT, _NBYTES = 0, 1
"""Words of the head: the version that is whole (0: none yet), and how large the memory of each of the two is."""
_LENGTH_BYTES = 8


@final
class Kept:
    """Where the workers of a host keep their state. One rank writes; nobody reads meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._head = (ctypes.c_int64 * 3).from_buffer(world.shared("kept", _HEAD_BYTES))

    def write(self, state: State) -> None:
        """From now on this is the state."""
        assert not state.carry, "the rows of a recurrent state are a rank's own"
        number = self._head[_COMMIT] + 1
        packed = Packed(state)
        packed.write(self._memory(number % 2, packed.nbytes))
        self._head[_NBYTES + number % 2] = packed.nbytes
        fence()
        self._head[_COMMIT] = number

    def read(self) -> State | None:
        """A copy of it; None where there was none yet."""
        number = self._head[_COMMIT]
        if not number:
            return None
        fence()
        return unpacked(self._memory(number % 2, self._head[_NBYTES + number % 2]))[0]

    def _memory(self, version: int, nbytes: int) -> memoryview:
        return self._world.shared(f"kept/{version}/{nbytes}", nbytes)


class Packed:
    """How a state lies in memory; with it goes whatever plain JSON is to be found there."""

    def __init__(self, state: State, beside: Any = None) -> None:
        self._tensors = list(_places(state))
        places = [
            [part, name, str(t.dtype).removeprefix("torch."), list(t.shape), at] for part, name, t, at in self._tensors
        ]
        head = {"step": state.step, "settings": state.settings, "tensors": places, "beside": beside}
        self._head = json.dumps(head).encode()
        self._begin = _rounded(_LENGTH_BYTES + len(self._head))
        end = max((at + _nbytes(t) for _, _, t, at in self._tensors), default=0)
        # L-BFGS keeps more from step to step. In powers of two, what it has grown out of is less than what it uses.
        self.nbytes = 1 << (self._begin + end).bit_length()

    def write(self, memory: memoryview) -> None:
        """Into so many bytes."""
        ctypes.c_int64.from_buffer(memory).value = len(self._head)
        memory[_LENGTH_BYTES : _LENGTH_BYTES + len(self._head)] = self._head
        for _, _, tensor, at in self._tensors:
            _view(memory, tensor.dtype, tensor.shape, self._begin + at).copy_(tensor)


def unpacked(memory: memoryview) -> tuple[State, Any]:
    """A copy of the state that lies there, and what is beside it."""
    length = ctypes.c_int64.from_buffer(memory).value
    head = json.loads(bytes(memory[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    begin = _rounded(_LENGTH_BYTES + length)
    found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for part, name, dtype, shape, at in head["tensors"]:
        found[part][name] = _view(memory, getattr(torch, dtype), shape, begin + at).clone()
    return State(step=head["step"], settings=head["settings"], **found), head["beside"]


def _places(state: State) -> Iterator[tuple[str, str, Tensor, int]]:
    """(part, name, tensor, where it begins) of every tensor."""
    at = 0
    for part, tensors in (("model", state.model), ("optimizer", state.optimizer)):
        for name, tensor in tensors.items():
            yield part, name, tensor, at
            at += _rounded(_nbytes(tensor))


def _view(memory: memoryview, dtype: torch.dtype, shape: Any, at: int) -> Tensor:
    numel = torch.Size(shape).numel()
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=at).view(shape)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
