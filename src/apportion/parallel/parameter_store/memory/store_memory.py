"""The shared memory of a store as one process maps it.

A shard has a lock, a version, its weights, and two copies of everything else: those of version v lie in copy v mod 2.
Each worker has a place of its own: its weights as it has pulled them, a gradient, the hyperparameters that go with it,
and a record of how far it is with what it does.
"""

from __future__ import annotations

import ctypes
from typing import Any, final

import numpy as np

from apportion.comm.process_lock import LOCK_BYTES, Lock, initialize
from apportion.comm.sync import Word
from apportion.parallel.parameter_store.memory.store_spec import (
    DraftRecord,
    ReportRecord,
    ServerRecord,
    StoreHead,
    StoreRegions,
    StoreSpec,
    WorkerRecord,
)

Array = np.ndarray[Any, Any]


@final
class ShardArrays:
    """What the workers have in common. What is not weights is there in two copies, or without locks in one."""

    def __init__(self, extent: StoreSpec, at: StoreRegions, memory: memoryview) -> None:
        self.copies = extent.copies
        begin = at["versions"].offset
        self.versions = [ctypes.c_int64.from_buffer(memory, begin + 64 * s) for s in range(extent.shards)]
        sizes = [len(pieces) for pieces in extent.layout.pieces]
        self.counts: list[list[Array]] = [
            [part.numpy() for part in copy.split(sizes)] for copy in at.tensor(memory, "counts")
        ]
        self.touched = at.tensor(memory, "touched").numpy()
        self.buffers = at.tensor(memory, "buffers")
        self.weights = at.tensor(memory, "weights")
        self.slots = at.tensor(memory, "slots")
        """The optimizer's slots, (copies, slots, numbers)."""

    def live(self, shard: int) -> int:
        """Return the copy that holds a shard's last version."""
        return self.versions[shard].value & (self.copies - 1)


@final
class WorkerArrays:
    """What each worker brings and takes away, by worker."""

    def __init__(self, at: StoreRegions, memory: memoryview) -> None:
        self.hyper = at.tensor(memory, "hyper").numpy()
        """The hyperparameters of each parameter group that go with the gradient."""
        self.used = at.tensor(memory, "used").numpy()
        """Flags that say which parameters the gradient is of."""
        self.changes = at.tensor(memory, "changes")
        self.own = at.tensor(memory, "own")
        """The weights as the worker has pulled them."""
        self.gradients = at.tensor(memory, "gradients")
        self.scratch = at.tensor(memory, "scratch")
        """A place for the drafts of a few shards, for each process that applies pushes."""


@final
class LogArrays:
    """The log: which batches a push was made of, and which versions it has made."""

    def __init__(self, extent: StoreSpec, at: StoreRegions, memory: memoryview) -> None:
        self._shards, self.capacity = extent.shards, extent.capacity
        self.made_rows: Array = at.tensor(memory, "made").numpy()
        """The version of each shard that a push has made, (workers, pushes, shards); 0: none yet."""
        self.made = (ctypes.c_int64 * self.made_rows.size).from_buffer(memory, at["made"].offset)
        """The flat form of ``made_rows``: quicker to write one by one."""
        self.entries: Array = at.tensor(memory, "entries").numpy()

    def row(self, worker: int, push: int) -> int:
        """Return where in ``made`` the line of a worker's push begins."""
        return (worker * self.capacity + push % self.capacity) * self._shards


OWN, SCRATCH = 1, 2
"""The place of the drafts: in the weights that the worker pulls, or, where it pulls none, in room for a few shards."""


@final
class StoreMemory:
    """The records, the arrays and the locks."""

    def __init__(self, extent: StoreSpec, memory: memoryview) -> None:
        at, workers = StoreRegions(extent), extent.workers
        self.extent, self._bytes, self._locks_at = extent, memory, at["locks"].offset
        (self.head,) = StoreHead.rows(memory, at["head"].offset, 1)
        self.ready = self.head.word("ready")
        self.turn = Word.from_buffer(memory, at["turn"].offset)
        self.lines = WorkerRecord.rows(memory, at["lines"].offset, workers)
        self.pushing = [line.word("pushing") for line in self.lines]
        """The push under way of each worker, which is over once the rest of its record is written."""
        self.drafts = DraftRecord.rows(memory, at["drafts"].offset, workers * (1 + extent.servers))
        """The drafts of each process that applies pushes: those of the workers, then those of each server, by
        worker."""
        self.reports = ReportRecord.rows(memory, at["reports"].offset, workers)
        self.servers = ServerRecord.rows(memory, at["servers"].offset, extent.servers)
        self.returned: Array = at.tensor(memory, "returned").numpy()
        """The batches that came back."""
        self.shards = ShardArrays(extent, at, memory)
        self.workers = WorkerArrays(at, memory)
        self.log = LogArrays(extent, at, memory)

    def open_locks(self) -> None:
        """Open every lock, once they are made."""
        places = [self._locks_at + LOCK_BYTES * i for i in range(self.extent.shards + 1)]
        *self.locks, self.queue_lock = [Lock(self._bytes, at) for at in places]

    def make_locks(self) -> None:
        """Make the locks, in one process, before any other looks at them."""
        for i in range(self.extent.shards + 1):
            initialize(self._bytes, self._locks_at + LOCK_BYTES * i)
