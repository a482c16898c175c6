"""The contents and the layout of a store's shared memory.

A shard has a lock, a version, its weights, and two copies of everything else: those of version v lie in copy v mod 2.
Each worker has a seat of its own: its weights as it has pulled them, a gradient, the hyperparameters that go with it,
and a line that says how far it is with what it does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from apportion.comm.process_lock import LOCK_BYTES, Lock, initialize
from apportion.comm.shared_layout import TensorRegions
from apportion.comm.sync import CACHE_LINE, Word
from apportion.parallel.parameter_store.shard_layout import StoreLayout

LOG_BYTES = 256 << 20
"""The most that the log may fill; a longer run keeps its end."""
READY, DEALT, RETURNED, BASE = range(4)
"""Words of the head: whether all of this is filled in; batches handed out; how many came back; updates before the
first."""
_TURN_BYTES = 64
STATE, PUSHES, ENTRIES, TAKEN, THEN, ENDED, ROUND = range(7)
"""Words of a seat: the number of the push under way (0: none); pushes made; batches in them; batches taken; ``ENTRIES``
after the push under way; whether it has taken its last batch; the round it has pulled for."""
DRAFTS, PUSHER, NUMBER, FIRST, SHARDS = range(5)
"""Words of a process that applies pushes: the place of the drafts that are about to become the weights of some shards
(0: none), the seat of their push, its number, the first shard, and how many."""
OWN, SCRATCH = 1, 2
"""The place of the drafts: in the weights that the seat pulls, or, where it pulls none, in a place for a few shards."""
RUN_SHARDS = 8
"""The largest number of shards that are updated in one go."""
RUN_BYTES = 1 << 20
"""The most bytes of weights that are updated in one go, no more than a cache holds: the drafts are read there."""
_WORDS = 16
TICKET, PUSH, VERSIONS = range(3)
"""Columns of a seat's log: which batch; in which push; from here on the version of each shard that its gradient was
computed on (the first is -1: on the weights that the batch before it had left)."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """The size of a store."""

    layout: StoreLayout
    seats: int
    buffers: int = 0
    """The number of elements of the model's buffers."""
    lock_free: bool = False
    """Tells whether the store has one copy, without locks."""
    batches: int = 0
    """The number of batches that the log should have room for."""
    servers: int = 0
    """The number of processes that the shards are divided among."""

    @property
    def shards(self) -> int:
        """The number of shards, with that of the buffers."""
        return self.layout.shards + (self.buffers > 0)

    @property
    def capacity(self) -> int:
        """The number of entries of each log."""
        each = 8 * self.seats * (VERSIONS + 2 * self.shards)
        return max(64, min(self.batches + 64, LOG_BYTES // each))


class Memory:
    """The arrays of a store."""

    def __init__(self, extent: StoreSpec) -> None:
        layout, seats, shards = extent.layout, extent.seats, extent.shards
        self.extent = extent
        self.shards, self.capacity = shards, extent.capacity
        self.copies = 1 if extent.lock_free else 2
        largest = max(b - a for a, b in pairwise(layout.bounds))
        self.run = max(1, min(RUN_SHARDS, -(-layout.shards // seats), RUN_BYTES // (largest * layout.dtype.itemsize)))
        """The largest number of shards that are updated in one go."""
        regions = TensorRegions(align=2 * CACHE_LINE)
        i64, f64 = torch.int64, torch.float64
        self._head = regions.add(i64, 8)
        self._turn = regions.add(torch.int32, _TURN_BYTES // 4)
        self._locks = regions.add(torch.uint8, shards + 1, LOCK_BYTES)
        self._versions = regions.add(i64, shards, 8)
        self._lines = regions.add(i64, seats, _WORDS)
        self._drafts = regions.add(i64, seats * (1 + extent.servers), _WORDS)
        self._hyper = regions.add(f64, seats, layout.many_groups, layout.hyper)
        self._told = regions.add(f64, seats, 8)
        self._used = regions.add(torch.uint8, seats, len(layout.parameters))
        self._touched = regions.add(torch.uint8, len(layout.parameters))
        self._ports = regions.add(i64, extent.servers, 2)
        self._returned = regions.add(i64, max(4096, extent.batches))
        self._made = regions.add(i64, seats, extent.capacity, shards)
        self._entries = regions.add(i64, seats, extent.capacity, VERSIONS + shards)
        self._counts = regions.add(f64, self.copies, sum(map(len, layout.pieces)))
        self._buffers = regions.add(f64, self.copies, extent.buffers)
        self._changes = regions.add(f64, seats, extent.buffers)
        self._weights = regions.add(layout.dtype, layout.total)
        self._slots = regions.add(layout.dtype, self.copies, len(layout.rule.slots), layout.total)
        self._own = regions.add(layout.dtype, seats, layout.total)
        self._scratch = regions.add(
            layout.dtype, seats * (1 + extent.servers), 0 if extent.lock_free else self.run * largest
        )
        self._gradients = regions.add(layout.dtype, seats, layout.total)
        self.nbytes = regions.nbytes

    def map(self, memory: memoryview) -> None:
        """Map these bytes as the arrays."""
        shards = self.extent.shards
        self.bytes = memory
        self.head = (ctypes.c_int64 * 8).from_buffer(memory, self._head.offset)
        self.turn = Word.from_buffer(memory, self._turn.offset)
        self.versions = [ctypes.c_int64.from_buffer(memory, self._versions.offset + 64 * s) for s in range(shards)]
        self.lines, self.drafts = (
            [(ctypes.c_int64 * _WORDS).from_buffer(memory, at.offset + 8 * _WORDS * n) for n in range(at.shape[0])]
            for at in (self._lines, self._drafts)
        )
        """The line of each seat; and the draft record of each process that applies pushes: the workers', one a seat,
        then each server's, one a seat."""
        self.hyper = self._hyper.of(memory).numpy()
        self.told = self._told.of(memory)
        """The numbers that a seat tells the others about its last batch: its loss and its staleness."""
        self.used = self._used.of(memory).numpy()
        self.touched = self._touched.of(memory).numpy()
        self.ports: Array = self._ports.of(memory).numpy()
        """The port where each server listens, and its process id, which is written last."""
        self.returned = self._returned.of(memory).numpy()
        self.made_rows: Array = self._made.of(memory).numpy()
        """The version of each shard that a push has made, (seats, pushes, shards); 0: none yet."""
        self.made = (ctypes.c_int64 * self.made_rows.size).from_buffer(memory, self._made.offset)
        """The flat form of ``made_rows``: quicker to write one by one."""
        self.entries: Array = self._entries.of(memory).numpy()
        counts = self._counts.of(memory)
        sizes = [len(pieces) for pieces in self.extent.layout.pieces]
        self.counts: list[list[Array]] = [[part.numpy() for part in copy.split(sizes)] for copy in counts]
        self.buffers = self._buffers.of(memory)
        self.changes = self._changes.of(memory)
        self.weights = self._weights.of(memory)
        self.slots = self._slots.of(memory)
        """The optimizer's slots, (copies, slots, numbers)."""
        self.own = self._own.of(memory)
        self.scratch = self._scratch.of(memory)
        self.gradients = self._gradients.of(memory)

    def open_locks(self) -> None:
        """Open every lock, once they are made."""
        places = [self._locks.offset + LOCK_BYTES * i for i in range(self.extent.shards + 1)]
        *self.locks, self.deal = [Lock(self.bytes, at) for at in places]

    def make_locks(self) -> None:
        """Make the locks, in one process, before any other looks at them."""
        for i in range(self.extent.shards + 1):
            initialize(self.bytes, self._locks.offset + LOCK_BYTES * i)

    def row(self, seat: int, push: int) -> int:
        """Return where in ``made`` the line of a seat's push begins."""
        return (seat * self.capacity + push % self.capacity) * self.shards

    def live(self, shard: int) -> int:
        """Return the copy that holds a shard's last version."""
        return self.versions[shard].value & (self.copies - 1)
