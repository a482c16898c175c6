"""The log of which batch was computed on which weights, and which update it made of them: enough to repeat the whole
run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from apportion.parallel.parameter_store.memory.store_memory import Array
from apportion.parallel.parameter_store.memory.store_spec import PUSH, TICKET, VERSIONS
from apportion.parallel.parameter_store.store import Store


@dataclass(frozen=True)
class Pushed:
    """One push: its batches in order, each with the versions that its gradient was computed on (None: on what the one
    before had left), and the version that it has made of each shard."""

    worker: int
    number: int
    batches: tuple[tuple[int, tuple[int, ...] | None], ...]
    made: tuple[int, ...]


@dataclass(frozen=True)
class PushLog:
    """All pushes since the store was filled in."""

    first: int
    """The number of updates behind the weights that the log begins with."""
    entries: tuple[Array, ...]
    """The log of each worker, (batches, 2 + shards): batch, number of the push, versions of the shards."""
    made: tuple[Array, ...]
    """The version of each shard that each push of a worker has made, (pushes, shards), one array a worker."""

    @classmethod
    def from_store(cls, store: Store) -> PushLog:
        """Read the log out of a store, while no worker pushes. ValueError where its beginning was overwritten."""
        m, entries, made = store.memory, [], []
        for worker, line in enumerate(m.lines):
            count, capacity = max(line.entries, line.pushes), store.extent.capacity
            if count >= capacity:
                raise ValueError(f"the log has room for {capacity} pushes of a worker, and there were {count}")
            entries.append(m.log.entries[worker, : line.entries].copy())
            made.append(m.log.made_rows[worker, 1 : line.pushes + 1].copy())
        return cls(m.head.base, tuple(entries), tuple(made))

    def pushes(self) -> Iterator[Pushed]:
        """Yield the pushes worker by worker. ValueError where a push has no batches, or no versions."""
        for worker, (entries, made) in enumerate(zip(self.entries, self.made, strict=True)):
            batches: dict[int, list[tuple[int, tuple[int, ...] | None]]] = {}
            for row in entries:
                versions = None if row[VERSIONS] < 0 else tuple(row[VERSIONS:].tolist())
                batches.setdefault(int(row[PUSH]), []).append((int(row[TICKET]), versions))
            if sorted(batches) != list(range(1, len(made) + 1)):
                raise ValueError(
                    f"the log is not whole: worker {worker} made {len(made)} pushes, and has batches of others"
                )
            for number, of in batches.items():
                yield Pushed(worker, number, tuple(of), tuple(made[number - 1].tolist()))

    def save(self, path: str | Path) -> None:
        """Write the log as a safetensors file."""
        tensors: dict[str, Any] = {}
        for name, arrays in (("entries", self.entries), ("made", self.made)):
            tensors |= {f"{name}/{worker}": torch.from_numpy(array) for worker, array in enumerate(arrays)}
        save_file(tensors, path, {"first": str(self.first), "seats": str(len(self.entries))})

    @classmethod
    def load(cls, path: str | Path) -> PushLog:
        """Read the log from a file that ``save`` wrote."""
        with safe_open(path, "np") as file:
            metadata: Mapping[str, str] = file.metadata()
            workers = range(int(metadata["seats"]))
            parts = [tuple(np.asarray(file.get_tensor(f"{name}/{s}")) for s in workers) for name in ("entries", "made")]
        return cls(int(metadata["first"]), *parts)
