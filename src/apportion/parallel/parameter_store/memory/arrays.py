"""The arrays in a store's shared memory: of the shards, of the workers, and of the log."""

from __future__ import annotations

import ctypes
from typing import Any, final

import numpy as np

from apportion.parallel.parameter_store.memory.store_spec import StoreRegions, StoreSpec

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
