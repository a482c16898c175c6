"""Every rank's part of the state after the last updates, in memory that outlives every worker.

::

    seat 0   version 0: generation 2, step 7   version 1: generation 2, step 8
    seat 1   version 0: generation 2, step 7   version 1: being written          step 7 is whole

A rank writes its part after each update, over the older of its two versions, which is first marked as not there. It
writes all of it, since nothing tells what an update has left as it was (torch counts the changes of a tensor, but not
those of a fused update, of batch statistics, or through ``.data``). An update needs every rank, so no rank writes step
9 before all have written step 8: whichever rank is lost, some step is whole. All ranks then read all parts, and go on
with it, however many they are and however they cut it now.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from apportion.comm.group import collective
from apportion.comm.sync import CommitWord
from apportion.comm.world import World
from apportion.core.strategy import State
from apportion.errors import StateLost
from apportion.parallel.replica.committed_state import StateLayout, unpacked

_HEAD_BYTES = 128
_STEP, _GENERATION, _RANK, _SIZE, _NBYTES, _WORDS = 0, 1, 2, 3, 4, 5
"""Words of a version: the step it is after, plus one (0: there is none), its generation, its rank, the number of ranks,
its bytes; and the number of words."""


@dataclass(frozen=True)
class Version:
    """A version of one seat's part that is complete in memory."""

    seat: int
    slot: int
    step: int
    generation: int
    rank: int
    size: int
    nbytes: int


def whole(versions: Sequence[Version]) -> list[Version] | None:
    """Return the versions of the latest step that all ranks of a generation have written, in rank order; None: there is
    none."""
    written: dict[tuple[int, int, int], dict[int, Version]] = {}
    for v in versions:
        written.setdefault((v.step, v.generation, v.size), {})[v.rank] = v
    for key in sorted(written, reverse=True):
        if len(written[key]) == key[2]:
            return [written[key][rank] for rank in range(key[2])]
    return None


@final
class CommittedShards:
    """The shards of the committed state that the workers of a host hold in shared memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._heads = [self._words(seat) for seat in range(world.seats)]
        self._steps = [
            [CommitWord(ctypes.c_int64.from_buffer(head, 8 * (slot * _WORDS + _STEP))) for slot in range(2)]
            for head in self._heads
        ]
        self._slot = 0
        """The number of this seat's version that is to stay."""
        self._packed: StateLayout | None = None
        self._views: dict[int, list[Tensor]] = {}
        """Views of the tensors in memory, by version, for those of this seat's versions whose layout is already
        written."""

    def _words(self, seat: int) -> Any:
        return (ctypes.c_int64 * (2 * _WORDS)).from_buffer(self._world.shared(f"parts/{seat}", _HEAD_BYTES))

    def write(self, state: State, pieces: Mapping[str, Any]) -> None:
        """Write this rank's part of the state; the version before it stays."""
        world, slot = self._world, 1 - self._slot
        head, at, step = self._heads[world.seat], slot * _WORDS, self._steps[world.seat][slot]
        step.withdraw()
        nbytes = self._pack(slot, state, pieces)
        head[at + _GENERATION : at + _WORDS] = [world.generation, world.rank, world.size, nbytes]
        step.publish(state.step + 1)
        self._slot = slot

    def _pack(self, slot: int, state: State, pieces: Mapping[str, Any]) -> int:
        """Write the state into memory and return its bytes. The layout is written only where it has changed since the
        last update: this process alone writes here."""
        packed = self._packed
        if packed is None or not packed.is_of(state, pieces):
            packed, self._views = StateLayout(state, pieces), {}
            self._packed = packed
        memory = self._memory(self._world.seat, slot, packed.nbytes)
        if slot not in self._views:
            self._views[slot] = packed.begin(memory)
        packed.write(memory, self._views[slot], state)
        return packed.nbytes

    def versions(self) -> list[Version]:
        """Return the versions that are there, of all seats."""
        found = []
        for seat, head in enumerate(self._heads):
            for slot in range(2):
                if step := self._steps[seat][slot].read():
                    generation, rank, size, nbytes = head[slot * _WORDS + _GENERATION : (slot + 1) * _WORDS]
                    found.append(Version(seat, slot, step - 1, generation, rank, size, nbytes))
        return found

    def read(self, versions: Sequence[Version]) -> list[tuple[State, Any]]:
        """Return copies of these versions, each with its pieces. This seat's next version is written over one that is
        not among them."""
        found = []
        for v in versions:
            if v.seat == self._world.seat:
                self._slot = v.slot
            found.append(unpacked(self._memory(v.seat, v.slot, v.nbytes)))
        return found

    @collective
    def latest(self) -> list[tuple[State, Any]]:
        """Return copies of every rank's part after the latest update that all have written, each with its pieces;
        StateLost: there is none. Called by all ranks: none writes while another still reads."""
        found = whole(self.versions())
        if found is None:
            raise StateLost("no update had been kept by all ranks")
        parts = self.read(found)
        self._world.group().barrier()
        return parts

    def _memory(self, seat: int, slot: int, nbytes: int) -> memoryview:
        return self._world.shared(f"parts/{seat}/{slot}/{nbytes}", nbytes)
