"""The shared memory of a store as one process maps it.

A shard has a lock, a version, its weights, and two copies of everything else: those of version v lie in copy v mod 2.
Each worker has a place of its own: its weights as it has pulled them, a gradient, the hyperparameters that go with it,
and a record of how far it is with what it does.
"""

from __future__ import annotations

from typing import final

from apportion.comm.process_lock import LOCK_BYTES, Lock, initialize
from apportion.comm.sync import Word
from apportion.parallel.parameter_store.memory.arrays import Array, LogArrays, ShardArrays, WorkerArrays
from apportion.parallel.parameter_store.memory.records import (
    DraftRecord,
    ReportRecord,
    ServerRecord,
    StoreHead,
    WorkerRecord,
)
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions, StoreSpec

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
        *self.locks, self.deal = [Lock(self._bytes, at) for at in places]

    def make_locks(self) -> None:
        """Make the locks, in one process, before any other looks at them."""
        for i in range(self.extent.shards + 1):
            initialize(self._bytes, self._locks_at + LOCK_BYTES * i)
