"""Every rank's part of the state after the last updates, in memory that outlives every worker.

::

    slot 0   version 0: generation 2, step 7   version 1: generation 2, step 8
    slot 1   version 0: generation 2, step 7   version 1: being written          step 7 is whole

A rank writes its part after each update, over the older of its two versions, which is first marked as not there. It
writes all of it, since nothing tells what an update has left as it was (torch counts the changes of a tensor, but not
those of a fused update, of batch statistics, or through ``.data``). An update needs every rank, so no rank writes step
9 before all have written step 8: whichever rank is lost, some step is whole. All ranks then read all parts, and go on
with it, however many they are and however they cut it now.

On several hosts each has the parts of its own ranks, and the first of them reads them out to all. Where there are
replicas the parts of one are the whole state, which may be there though a host is lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.group import collective, gather_messages
from apportion.comm.sync import CommitWord
from apportion.comm.world import World
from apportion.core.strategy import State
from apportion.errors import StateLost
from apportion.parallel.replica.committed_state import StateLayout, unpacked

_HEAD_BYTES = 128
_STEP, _GENERATION, _REPLICA, _RANK, _SIZE, _NBYTES, _WORDS = 0, 1, 2, 3, 4, 5, 6
"""Words of a version: the step it is after, plus one (0: there is none), its generation, its replica, its rank in that,
the number of ranks of that, its bytes; and the number of words."""


@dataclass(frozen=True)
class Version:
    """A version of one slot's part that is complete in memory."""

    holder: int
    """The first rank of the host in whose memory it is."""
    slot: int
    version: int
    step: int
    generation: int
    replica: int
    rank: int
    """The rank in the replica that has written it."""
    size: int
    nbytes: int


def whole(versions: Sequence[Version]) -> list[Version] | None:
    """Return the versions of the latest step that all ranks of a replica have written in a generation, in rank order;
    None: there is none."""
    written: dict[tuple[int, int, int, int], dict[int, Version]] = {}
    for v in versions:
        written.setdefault((v.step, v.generation, v.replica, v.size), {})[v.rank] = v
    for key in sorted(written, reverse=True):
        if len(written[key]) == key[3]:
            return [written[key][rank] for rank in range(key[3])]
    return None


@final
class CommittedShards:
    """The shards of the committed state that the workers of a host hold in shared memory. ``within``: the part of the
    world that is one replica of the network, and ``replica``, its number; None: there is one."""

    def __init__(self, world: World, within: World | None = None, replica: int = 0) -> None:
        self._world, self._within, self._replica = world, within or world, replica
        self._holder = world.rank - world.local_rank
        self._heads = [self._words(slot) for slot in range(world.slots)]
        self._steps = [
            [CommitWord(ctypes.c_int64.from_buffer(head, 8 * (version * _WORDS + _STEP))) for version in range(2)]
            for head in self._heads
        ]
        self._version = 0
        """The number of this slot's version that is to stay."""
        self._packed: StateLayout | None = None
        self._views: dict[int, list[Tensor]] = {}
        """Views of the tensors in memory, by version, for those of this slot's versions whose layout is already
        written."""

    def _words(self, slot: int) -> Any:
        return (ctypes.c_int64 * (2 * _WORDS)).from_buffer(self._world.shared(f"parts/{slot}", _HEAD_BYTES))

    def write(self, state: State, pieces: Mapping[str, Any]) -> None:
        """Write this rank's part of the state; the version before it stays."""
        world, within, version = self._world, self._within, 1 - self._version
        head, at, step = self._heads[world.slot], version * _WORDS, self._steps[world.slot][version]
        # The version counts as absent while it is written: a rank that dies in the middle leaves its other version,
        # which is whole, and no reader sees a mixture of two steps.
        step.withdraw()
        nbytes = self._pack(version, state, pieces)
        head[at + _GENERATION : at + _WORDS] = [
            world.generation, self._replica, within.rank, within.size, nbytes,
        ]  # fmt: skip
        # The step is written after the tensors and the other words. Zero means absent, hence one more than the step.
        step.publish(state.step + 1)
        self._version = version

    def _pack(self, version: int, state: State, pieces: Mapping[str, Any]) -> int:
        """Write the state into memory and return its bytes. The layout is written only where it has changed since the
        last update: this process alone writes here."""
        packed = self._packed
        if packed is None or not packed.is_of(state, pieces):
            packed, self._views = StateLayout(state, pieces), {}
            self._packed = packed
        memory = self._memory(self._world.slot, version, packed.nbytes)
        if version not in self._views:
            self._views[version] = packed.write_head(memory)
        packed.write(memory, self._views[version], state)
        return packed.nbytes

    def versions(self) -> list[Version]:
        """Return the versions that are there, of all slots of this host."""
        found = []
        for slot, head in enumerate(self._heads):
            for version in range(2):
                if step := self._steps[slot][version].read():
                    rest = head[version * _WORDS + _GENERATION : (version + 1) * _WORDS]
                    found.append(Version(self._holder, slot, version, step - 1, *rest))
        return found

    @collective
    def latest(self) -> list[tuple[State, Any]]:
        """Return copies of the parts of one replica after the latest update that all of its ranks have written, each
        with its pieces; StateLost: there is none. This slot's next version is written over one that is not among them.
        Called by all ranks: none writes while another still reads."""
        found = whole(self._versions_everywhere())
        if found is None:
            raise StateLost("no update had been kept by all ranks")
        parts = []
        for v in found:
            if (v.holder, v.slot) == (self._holder, self._world.slot):
                self._version = v.version
            parts.append(unpacked(self._read_version(v)))
        # No rank returns, and writes its next version over an old one, before every rank has copied what it needs.
        self._world.group().barrier()
        return parts

    @collective
    def _versions_everywhere(self) -> list[Version]:
        versions, world = self.versions(), self._world
        if world.local_size == world.size:
            return versions
        gathered = gather_messages([astuple(v) for v in versions] if world.rank == self._holder else [], world.group())
        return [Version(*numbers) for versions in gathered for numbers in versions]

    @collective
    def _read_version(self, version: Version) -> memoryview:
        """Return the memory of a version, or what its host reads out of it."""
        v, world = version, self._world
        is_own = v.holder == self._holder
        if world.local_size == world.size:
            return self._memory(v.slot, v.version, v.nbytes)
        memory = self._memory(v.slot, v.version, v.nbytes) if is_own else memoryview(bytearray(v.nbytes))
        data = torch.frombuffer(memory, dtype=torch.uint8)
        if is_own and world.rank != v.holder:  # it is there already, and is not to be written
            data = data.clone()
        world.group().broadcast(data, source=v.holder)
        return memory

    def _memory(self, slot: int, version: int, nbytes: int) -> memoryview:
        return self._world.shared(f"parts/{slot}/{version}/{nbytes}", nbytes)
