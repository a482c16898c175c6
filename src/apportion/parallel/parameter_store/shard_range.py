"""The shards of a store that one server has, and the chunks of them that travel together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from torch import Tensor

from apportion.parallel.parameter_store.memory.store_spec import StoreSpec

CHUNK_BYTES = 4 << 20
"""The bytes of weights that travel, or are copied out, while the next ones are updated."""


@final
class Range:
    """The shards of one server. ``chunk_bytes``: the bytes of weights of a chunk."""

    def __init__(self, extent: StoreSpec, number: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        n = extent.servers
        self.first, self.last = number * extent.shards // n, (number + 1) * extent.shards // n
        self.buffers = extent.buffers > 0 and self.last == extent.shards
        self._bounds, self._most = extent.layout.bounds, extent.layout.shards
        self._step = max(1, chunk_bytes // (extent.layout.dtype.itemsize * (self._bounds[1] - self._bounds[0])))

    def part_of(self, flat: Tensor) -> Tensor:
        """Return the server's part of a flat vector."""
        return self._slice(flat, self.first, self.last)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the shards (first, last) that travel together; the shard of the buffers is a chunk by itself."""
        end = min(self.last, self._most)
        for first in range(self.first, end, self._step):
            yield first, min(end, first + self._step)
        if self.buffers:
            yield self._most, self._most + 1

    def chunk(self, at: tuple[int, int], weights: Tensor, buffers: Tensor) -> Tensor:
        """Return the part of the weights, or the buffers, that one of these chunks consists of."""
        return buffers if at[0] >= self._most else self._slice(weights, *at)

    def _slice(self, flat: Tensor, first: int, last: int) -> Tensor:
        return flat[self._bounds[min(first, self._most)] : self._bounds[min(last, self._most)]]
