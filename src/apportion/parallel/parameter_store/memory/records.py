"""The records in a store's shared memory, by which processes tell each other how far they are."""

from __future__ import annotations

import ctypes
from typing import ClassVar, Self

from apportion.comm.sync import CommitWord

_I64, _F64 = ctypes.c_int64, ctypes.c_double


class StoreRecord(ctypes.Structure):
    """A few numbers of eight bytes each, on cache lines of their own."""

    words: ClassVar[int]
    """The number of words from one record to the next."""

    @classmethod
    def rows(cls, memory: memoryview, offset: int, many: int) -> list[Self]:
        """Return this number of consecutive records in memory."""
        return [cls.from_buffer(memory, offset + 8 * cls.words * n) for n in range(many)]

    def word(self, name: str) -> CommitWord:
        """Return a field as a commit word, which is written after what it describes."""
        return CommitWord(_I64.from_buffer(self, getattr(type(self), name).offset))


class StoreHead(StoreRecord):
    """What is known of the store as a whole."""

    words = 8
    ready: int
    """Tells whether everything else is filled in."""
    dealt: int
    """The number of batches handed out."""
    returned: int
    """The number of batches that came back."""
    base: int
    """The number of updates before the first."""
    _fields_ = (("ready", _I64), ("dealt", _I64), ("returned", _I64), ("base", _I64))


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
