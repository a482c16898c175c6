"""The size of a store, the records that it consists of, and the place of each array in its shared memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor

from apportion.comm.process_lock import LOCK_BYTES
from apportion.comm.shared_layout import TensorRegion, TensorRegions
from apportion.comm.sync import CACHE_LINE, CommitWord
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout

_I64, _F64 = ctypes.c_int64, ctypes.c_double


class StoreRecord(ctypes.Structure):
    """A few numbers of eight bytes each, on cache lines of their own."""

    words: ClassVar[int]
    """The number of words from one record to the next."""

    @classmethod
    def rows(cls, memory: memoryview, offset: int, count: int) -> list[Self]:
        """Return this number of consecutive records in memory."""
        return [cls.from_buffer(memory, offset + 8 * cls.words * n) for n in range(count)]

    def word(self, name: str) -> CommitWord:
        """Return a field as a commit word, which is written after what it describes."""
        return CommitWord(_I64.from_buffer(self, getattr(type(self), name).offset))


class StoreHead(StoreRecord):
    """What is known of the store as a whole."""

    words = 8
    ready: int
    """Tells whether everything else is filled in."""
    handed_out: int
    """The number of batches handed out."""
    returned: int
    """The number of batches that came back."""
    base: int
    """The number of updates before the first."""
    _fields_ = (("ready", _I64), ("handed_out", _I64), ("returned", _I64), ("base", _I64))


class WorkerRecord(StoreRecord):
    """How far a worker is."""

    words = 16
    pushing: int
    """The number of the push under way; 0: none."""
    pushes: int
    """The number of pushes made."""
    entries: int
    """The number of batches in the pushes made."""
    taken: int
    """The number of batches taken."""
    entries_then: int
    """The value of ``entries`` after the push under way."""
    ended: int
    """Tells whether the worker has taken its last batch."""
    round: int
    """The round that the worker has pulled for."""
    _fields_ = (
        ("pushing", _I64),
        ("pushes", _I64),
        ("entries", _I64),
        ("taken", _I64),
        ("entries_then", _I64),
        ("ended", _I64),
        ("round", _I64),
    )


class DraftRecord(StoreRecord):
    """The drafts of a process that applies pushes, which are about to become the weights of some shards."""

    words = 16
    place: int
    """The place of the drafts: ``OWN`` or ``SCRATCH``; 0: there are none."""
    worker: int
    """The worker of their push."""
    number: int
    """The number of their push."""
    first: int
    """The first shard."""
    shards: int
    """The number of shards."""
    _fields_ = (("place", _I64), ("worker", _I64), ("number", _I64), ("first", _I64), ("shards", _I64))


class ReportRecord(StoreRecord):
    """The numbers that a worker reports to the others about its last batch."""

    words = 8
    loss: float
    """The mean loss of the batch."""
    staleness: float
    """The staleness of its gradient."""
    _fields_ = (("loss", _F64), ("staleness", _F64))


class ServerRecord(StoreRecord):
    """The place where a server listens."""

    words = 2
    place: int
    """The number by which its socket is found."""
    pid: int
    """The process id of the server, which is written last."""
    _fields_ = (("place", _I64), ("pid", _I64))


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
            "hyper": regions.add(f64, workers, layout.group_count, layout.hyper),
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
