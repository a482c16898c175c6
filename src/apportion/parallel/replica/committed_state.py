"""The whole state after the last update, in memory that outlives every worker.

::

    word c            version c % 2 is whole
    version 0, 1      what lies where (JSON) | tensor | tensor | ... | step, settings (JSON)

One rank writes the version that is not live, then the word: a death in the middle leaves the last whole one behind, and
so does the death of all ranks at once. It serves updates that every rank makes in the same way, whatever the optimizer
keeps; weights that lie in shared pages need no copy (``shared_weights/update.py``).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.shared_layout import TensorRegion, TensorRegions
from apportion.comm.sync import CACHE_LINE, CommitWord, round_up
from apportion.comm.world import World
from apportion.core.strategy import State

_HEAD_BYTES = CACHE_LINE
_COMMIT, _NBYTES = 0, 1
"""Words of the head: the version that is whole (0: none yet), and how large the memory of each of the two is."""
_LENGTHS_BYTES = 16
_PARTS = ("model", "optimizer", "buffers", "python")


@final
class CommittedState:
    """The memory in which the workers of a host keep their state. One rank writes, and no rank reads meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        memory = world.shared("kept", _HEAD_BYTES)
        self._head = (ctypes.c_int64 * 3).from_buffer(memory)
        self._commit = CommitWord(ctypes.c_int64.from_buffer(memory, 8 * _COMMIT))

    def write(self, state: State) -> None:
        """Write a state, which is the current one from now on."""
        assert not state.carry, "the rows of a recurrent state are a rank's own"
        number = self._commit.read() + 1
        packed = StateLayout(state)
        # The other of two places: the last state stays whole until the word names this one.
        memory = self._memory(number % 2, packed.nbytes)
        packed.write(memory, packed.write_head(memory), state)
        self._head[_NBYTES + number % 2] = packed.nbytes
        self._commit.publish(number)

    def read(self) -> State | None:
        """A copy of the state; None where none has been written yet."""
        number = self._commit.read()
        if not number:
            return None
        return unpacked(self._memory(number % 2, self._head[_NBYTES + number % 2]))[0]

    def _memory(self, version: int, nbytes: int) -> memoryview:
        return self._world.shared(f"kept/{version}/{nbytes}", nbytes)


class StateLayout:
    """The layout in memory of states that differ in their numbers alone; any plain JSON may lie beside them.

    ::

        lengths | what lies where, what is beside it (JSON) | tensor | tensor | ... | step, settings (JSON)
    """

    def __init__(self, state: State, beside: Any = None) -> None:
        self._beside, self._kinds = beside, _kinds(state)
        regions = TensorRegions()
        self._regions = [regions.add(dtype, *shape) for _, _, dtype, shape in self._kinds]
        tensors = [
            [part, name, str(dtype).removeprefix("torch."), list(shape), region.offset]
            for (part, name, dtype, shape), region in zip(self._kinds, self._regions, strict=True)
        ]
        self._head = json.dumps({"tensors": tensors, "beside": beside}).encode()
        self._begin = round_up(_LENGTHS_BYTES + len(self._head))
        self._end = self._begin + regions.nbytes
        # L-BFGS keeps more from step to step. In powers of two, what it has grown out of is less than what it uses.
        self.nbytes = 1 << (self._end + len(_encode_rest(state))).bit_length()

    def is_of(self, state: State, beside: Any) -> bool:
        """Return whether a state has this layout, too. What is beside it is compared by its identity."""
        fits = self._end + len(_encode_rest(state)) <= self.nbytes
        return fits and beside is self._beside and self._kinds == _kinds(state)

    def write_head(self, memory: memoryview) -> list[Tensor]:
        """Write what all states of this layout have in common into memory of ``nbytes`` bytes; returns views of the
        places where their tensors go."""
        _lengths(memory)[0] = len(self._head)
        memory[_LENGTHS_BYTES : _LENGTHS_BYTES + len(self._head)] = self._head
        return [region.of(memory, self._begin) for region in self._regions]

    def write(self, memory: memoryview, views: Sequence[Tensor], state: State) -> None:
        """Write the rest of a state: its tensors, its step and its settings."""
        rest_bytes = _encode_rest(state)
        _lengths(memory)[1] = len(rest_bytes)
        memory[self._end : self._end + len(rest_bytes)] = rest_bytes
        for view, tensor in zip(views, (t for part in _PARTS for t in getattr(state, part).values()), strict=True):
            view.copy_(tensor)


def unpacked(memory: memoryview) -> tuple[State, Any]:
    """A copy of the state that lies in this memory, and what is beside it."""
    length, rest_bytes = _lengths(memory)
    head = json.loads(bytes(memory[_LENGTHS_BYTES : _LENGTHS_BYTES + length]))
    begin = end = round_up(_LENGTHS_BYTES + length)
    found: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for part, name, dtype, shape, at in head["tensors"]:
        tensor = found[part][name] = TensorRegion(at, getattr(torch, dtype), tuple(shape)).of(memory, begin).clone()
        end = begin + at + round_up(tensor.nbytes)
    rest = json.loads(bytes(memory[end : end + rest_bytes]))
    return State(step=rest["step"], settings=rest["settings"], **found), head["beside"]


def _lengths(memory: memoryview) -> Any:
    return (ctypes.c_int64 * 2).from_buffer(memory)


def _kinds(state: State) -> list[tuple[str, str, torch.dtype, torch.Size]]:
    """The (part, name, type, shape) of every tensor."""
    return [(part, name, t.dtype, t.shape) for part in _PARTS for name, t in getattr(state, part).items()]


def _encode_rest(state: State) -> bytes:
    return json.dumps({"step": state.step, "settings": state.settings}).encode()
