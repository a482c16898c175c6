"""What a store keeps in shared memory, and where.

A shard has a lock, a version and two copies: version v lies in copy v mod 2. Each worker has a seat of its own: a
gradient, the hyperparameters that go with it, and a line that says how far it is with what it does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.comm.futex import Word
from apportion.store.layout import Layout, Regions
from apportion.store.lock import LOCK_BYTES, Lock, initialize

LOG_BYTES = 256 << 20
"""The most that the log may fill; a longer run keeps its end."""
READY, DEALT, RETURNED, BASE = range(4)
"""Words of the head: is all of this filled in; batches dealt; how many came back; updates before the first."""
_TURN_BYTES = 64
STATE, PUSHES, ENTRIES, TAKEN, THEN, ENDED, ROUND = range(7)
"""Words of a seat: the number of the push under way (0: none); pushes made; batches in them; batches taken; ``ENTRIES``
after the push under way; has it taken its last batch? the round it has pulled for."""
_WORDS = 16
TICKET, PUSH, VERSIONS = range(3)
"""Columns of a seat's log: which batch; in which push; from here on the version of each shard that its gradient was
computed on (the first is -1: on what the batch before it had left)."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How large a store is."""

    layout: Layout
    seats: int
    buffers: int = 0
    """Numbers in the model's buffers."""
    lock_free: bool = False
    """One copy, without locks."""
    batches: int = 0
    """That the log should have room for."""
    servers: int = 0
    """Processes that the shards are divided among."""

    @property
    def shards(self) -> int:
        """With that of the buffers."""
        return self.layout.shards + (self.buffers > 0)

    @property
    def capacity(self) -> int:
        """Entries of each log."""
        each = 8 * self.seats * (VERSIONS + 2 * self.shards)
        return max(64, min(self.batches + 64, LOG_BYTES // each))


class Memory:
    """The arrays of a store."""

    def __init__(self, extent: Extent) -> None:
        layout, seats, shards = extent.layout, extent.seats, extent.shards
        self.extent = extent
        self.shards, self.capacity = shards, extent.capacity
        self.copies = 1 if extent.lock_free else 2
        regions = Regions()
        i64, f64 = torch.int64, torch.float64
        self._head = regions.add(i64, 8)
        self._turn = regions.add(torch.int32, _TURN_BYTES // 4)
        self._locks = regions.add(torch.uint8, shards + 1, LOCK_BYTES)
        self._versions = regions.add(i64, shards, 8)
        self._lines = regions.add(i64, seats, _WORDS)
        self._hyper = regions.add(f64, seats, layout.many_groups, layout.hyper)
        self._told = regions.add(f64, seats, 8)
        self._used = regions.add(torch.uint8, seats, len(layout.parameters))
        self._touched = regions.add(torch.uint8, len(layout.parameters))
        self._ports = regions.add(i64, extent.servers, 2)
        self._returned = regions.add(i64, 4096)
        self._made = regions.add(i64, seats, extent.capacity, shards)
        self._entries = regions.add(i64, seats, extent.capacity, VERSIONS + shards)
        self._counts = regions.add(f64, self.copies, sum(map(len, layout.pieces)))
        self._buffers = regions.add(f64, self.copies, extent.buffers)
        self._changes = regions.add(f64, seats, extent.buffers)
        self._data = regions.add(layout.dtype, self.copies, 1 + len(layout.rule.slots), layout.total)
        self._gradients = regions.add(layout.dtype, seats, layout.total)
        self.nbytes = regions.nbytes

    def map(self, memory: memoryview) -> None:
        """See these bytes as the arrays."""
        shards = self.extent.shards
        self.bytes = memory
        self.head = (ctypes.c_int64 * 8).from_buffer(memory, self._head.offset)
        self.turn = Word.from_buffer(memory, self._turn.offset)
        self.versions = [ctypes.c_int64.from_buffer(memory, self._versions.offset + 64 * s) for s in range(shards)]
        at = self._lines.offset
        self.lines = [
            (ctypes.c_int64 * _WORDS).from_buffer(memory, at + 8 * _WORDS * seat) for seat in range(self.extent.seats)
        ]
        self.hyper = self._hyper.of(memory).numpy()
        self.told = self._told.of(memory)
        """What a seat tells the others about its last batch."""
        self.used = self._used.of(memory).numpy()
        self.touched = self._touched.of(memory).numpy()
        self.ports: Array = self._ports.of(memory).numpy()
        """Of each server: the port where it listens, and its process, written last."""
        self.returned = self._returned.of(memory).numpy()
        self.made_rows: Array = self._made.of(memory).numpy()
        """(seats, pushes, shards): which version of each shard a push has made; 0: none yet."""
        self.made = (ctypes.c_int64 * self.made_rows.size).from_buffer(memory, self._made.offset)
        """The same, flat: quicker to write one by one."""
        self.entries: Array = self._entries.of(memory).numpy()
        counts = self._counts.of(memory)
        sizes = [len(pieces) for pieces in self.extent.layout.pieces]
        self.counts: list[list[Array]] = [[part.numpy() for part in copy.split(sizes)] for copy in counts]
        self.buffers = self._buffers.of(memory)
        self.changes = self._changes.of(memory)
        self.data = self._data.of(memory)
        self.gradients = self._gradients.of(memory)

    def open_locks(self) -> None:
        """Every lock, once they are made."""
        places = [self._locks.offset + LOCK_BYTES * i for i in range(self.extent.shards + 1)]
        *self.locks, self.deal = [Lock(self.bytes, at) for at in places]

    def make_locks(self) -> None:
        """By one process, before any other looks."""
        for i in range(self.extent.shards + 1):
            initialize(self.bytes, self._locks.offset + LOCK_BYTES * i)

    def row(self, seat: int, push: int) -> int:
        """Where in ``made`` a seat's push has its line."""
        return (seat * self.capacity + push % self.capacity) * self.shards

    def live(self, shard: int) -> int:
        """Which copy holds a shard's last version."""
        return self.versions[shard].value & (self.copies - 1)

    def weights(self, copy: int) -> Tensor:
        """One copy's."""
        return self.data[copy, 0]
