"""The size of a store, and where each array lies in its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from apportion.comm.process_lock import LOCK_BYTES
from apportion.comm.shared_layout import TensorRegion, TensorRegions
from apportion.comm.sync import CACHE_LINE
from apportion.parallel.parameter_store.memory.records import (
    DraftRecord,
    ReportRecord,
    ServerRecord,
    StoreHead,
    WorkerRecord,
)
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout

LOG_BYTES = 256 << 20
"""The most that the log may fill; a longer run keeps its end."""
RUN_SHARDS = 8
"""The largest number of shards that are updated in one go."""
RUN_BYTES = 1 << 20
"""The most bytes of weights that are updated in one go, no more than a cache holds: the drafts are read there."""
TICKET, PUSH, VERSIONS = range(3)
"""Columns of a worker's log: which batch; in which push; from here on the version of each shard that its gradient was
computed on (the first is -1: on the weights that the batch before it had left)."""
_TURN_WORDS = 16


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """The size of a store."""

    layout: StoreLayout
    workers: int
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
        each = 8 * self.workers * (VERSIONS + 2 * self.shards)
        return max(64, min(self.batches + 64, LOG_BYTES // each))

    @property
    def copies(self) -> int:
        """The number of copies of everything but the weights."""
        return 1 if self.lock_free else 2

    @property
    def largest(self) -> int:
        """The number of elements of the largest shard."""
        return max(b - a for a, b in pairwise(self.layout.bounds))

    @property
    def run(self) -> int:
        """The largest number of this store's shards that are updated in one go."""
        layout = self.layout
        fits: int = RUN_BYTES // (self.largest * layout.dtype.itemsize)
        return max(1, min(RUN_SHARDS, -(-layout.shards // self.workers), fits))


class StoreRegions:
    """The places of a store's arrays."""

    def __init__(self, extent: StoreSpec) -> None:
        layout, workers, shards, copies = extent.layout, extent.workers, extent.shards, extent.copies
        regions, i64, f64, flags = TensorRegions(align=2 * CACHE_LINE), torch.int64, torch.float64, torch.uint8
        appliers = workers * (1 + extent.servers)
        self._at = {
            "head": regions.add(i64, StoreHead.words),
            "turn": regions.add(torch.int32, _TURN_WORDS),
            "locks": regions.add(flags, shards + 1, LOCK_BYTES),
            "versions": regions.add(i64, shards, 8),
            "lines": regions.add(i64, workers, WorkerRecord.words),
            "drafts": regions.add(i64, appliers, DraftRecord.words),
            "hyper": regions.add(f64, workers, layout.many_groups, layout.hyper),
            "reports": regions.add(f64, workers, ReportRecord.words),
            "used": regions.add(flags, workers, len(layout.parameters)),
            "touched": regions.add(flags, len(layout.parameters)),
            "servers": regions.add(i64, extent.servers, ServerRecord.words),
            "returned": regions.add(i64, max(4096, extent.batches)),
            "made": regions.add(i64, workers, extent.capacity, shards),
            "entries": regions.add(i64, workers, extent.capacity, VERSIONS + shards),
            "counts": regions.add(f64, copies, sum(map(len, layout.pieces))),
            "buffers": regions.add(f64, copies, extent.buffers),
            "changes": regions.add(f64, workers, extent.buffers),
            "weights": regions.add(layout.dtype, layout.total),
            "slots": regions.add(layout.dtype, copies, len(layout.rule.slots), layout.total),
            "own": regions.add(layout.dtype, workers, layout.total),
            "scratch": regions.add(layout.dtype, appliers, 0 if extent.lock_free else extent.run * extent.largest),
            "gradients": regions.add(layout.dtype, workers, layout.total),
        }
        self.nbytes = regions.nbytes

    def __getitem__(self, name: str) -> TensorRegion:
        return self._at[name]

    def tensor(self, memory: memoryview, name: str) -> Tensor:
        """Return an array as it lies in these bytes."""
        return self._at[name].of(memory)
