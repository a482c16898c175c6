"""The state of one range of shards, as its server and the server's copy each hold it, and its forms in messages.

``RangeState`` has the weights and slots, the versions and the log, the queue of batches (``QueueState``), and how far
each worker is (``WorkerState``), with the push that it has sent (``StagedGradient``). ``dump`` and ``restore`` move all
of it to a copy on another host; ``collect`` puts together what all ranges hold.

Pushes are applied one after the other, so that all shards of a range have them in one order, and its copy on another
host, which applies them in the same order, has the same bits. A pull may come in between: it finds some shards as one
push has left them, and others as the one before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from apportion.parallel.parameter_store.memory.shard_layout import updates_alike
from apportion.parallel.parameter_store.memory.store_spec import TICKET, VERSIONS, StoreSpec
from apportion.parallel.parameter_store.shard_range import Range
from apportion.parallel.parameter_store.store import Contents

NO_TICKET = -1
"""The number of no batch, in a message."""


@dataclass
class QueueState:
    """The batches that were handed out. ``handed_out``: the first that never was; ``returned``: those that came back;
    ``opened``: by worker, those that it has and has not pushed; ``ended``: the workers that take no more for now."""

    handed_out: int = 0
    returned: list[int] = field(default_factory=list)
    opened: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    stopped: bool = False
    """Tells whether the run was ended before its last batch: nothing is handed out."""

    def next_batch(self, total: int) -> int | None:
        """Return the batch that is handed out next, out of ``total``; None where all are handed out."""
        if self.stopped:
            return None
        if self.returned:
            return self.returned[-1]
        return self.handed_out if self.handed_out < total else None

    def unacknowledged(self, worker: int, last: int) -> int | None:
        """Return the batch that a worker has and does not know of, since the answer was lost with a server or a
        connection; None where there is none. ``last``: the last batch that it knows of (NO_TICKET: none)."""
        opened = self.opened.get(worker)
        return opened[-1] if opened and opened[-1] != last else None

    def hand_out(self, worker: int, batch: int) -> None:
        """Note that a worker has this batch, which ``next_batch`` has named."""
        if self.returned and self.returned[-1] == batch:
            self.returned.pop()
        else:
            self.handed_out = max(self.handed_out, batch + 1)
        self.opened.setdefault(worker, []).append(batch)
        self.ended.discard(worker)

    def mark_pushed(self, worker: int, batches: Iterable[int]) -> None:
        """Note that these batches of a worker are in the weights."""
        done = set(batches)
        self.opened[worker] = [batch for batch in self.opened.get(worker, []) if batch not in done]

    def give_back(self, worker: int) -> None:
        """Put the batches that a worker has and has not pushed back, to be handed out first."""
        self.returned += sorted(self.opened.pop(worker, []), reverse=True)
        self.ended.add(worker)

    def is_through(self, total: int) -> bool:
        """Tell whether every batch is in the weights."""
        return self.stopped or (self.handed_out >= total and not self.returned and not any(self.opened.values()))

    def unpushed(self) -> list[int]:
        """Return the batches that were handed out and are not in the weights."""
        return sorted({*self.returned, *(batch for batches in self.opened.values() for batch in batches)})

    def resume(self, done: int, unpushed: Iterable[int]) -> None:
        """Begin again after ``done`` updates, with batches that were handed out in an earlier run and are not among
        them: they come first."""
        self.returned = sorted(unpushed, reverse=True)
        self.handed_out = done + len(self.returned)
        self.opened.clear()
        self.ended.clear()
        self.stopped = False

    def to_json(self) -> dict[str, Any]:
        """Return the queue as plain JSON."""
        opened = {str(worker): batches for worker, batches in self.opened.items()}
        return {"dealt": self.handed_out, "returned": self.returned, "opened": opened, "ended": sorted(self.ended)}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> QueueState:
        """Make the queue that ``to_json`` has written."""
        opened = {int(worker): list(batches) for worker, batches in given["opened"].items()}
        return cls(int(given["dealt"]), list(given["returned"]), opened, set(given["ended"]))


RUN_BYTES = 1 << 20
"""The bytes of weights that are updated, and sent, in one go: no more than a cache holds."""
Copied = Callable[[int, int], None]
"""Called with the shards (first, last), numbered as in the store, that were copied out."""


@dataclass
class StagedGradient:
    """A worker's push as it was sent: it is in no shard yet."""

    number: int
    entries: Tensor
    """The rows of the log, (batches, 2 + shards of the range): batch, number of the push, versions of the shards."""
    hyper: Tensor
    """The hyperparameters of each parameter group."""
    used: Tensor
    """Flags that say which parameters have a gradient."""
    change: Tensor
    """The change of the buffers, where the range has them."""
    gradient: Tensor

    @classmethod
    def allocate(
        cls, extent: StoreSpec, shard_range: Range, number: int, batches: int, gradient: Tensor
    ) -> StagedGradient:
        """Make room for a push of ``batches`` batches; the gradient goes into ``gradient``."""
        layout = extent.layout
        return cls(
            number,
            torch.zeros(batches, VERSIONS + shard_range.last - shard_range.first, dtype=torch.int64),
            torch.zeros(layout.group_count, layout.hyper, dtype=torch.float64),
            torch.zeros(len(layout.parameters), dtype=torch.uint8),
            torch.zeros(extent.buffers if shard_range.buffers else 0, dtype=torch.float64),
            gradient,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in the order in which they travel."""
        return [self.entries, self.hyper, self.used, self.change, self.gradient]

    @property
    def batches(self) -> list[int]:
        """The batches of the push."""
        return [int(batch) for batch in self.entries[:, TICKET]]


@dataclass
class WorkerState:
    """How far a worker is. ``incarnation``: which process it is, and which of its connections speak for it."""

    incarnation: int = 0
    applied: int = 0
    """The number of the last push that the range has."""
    staged: StagedGradient | None = None
    """The push after it, where it has arrived."""


@dataclass(frozen=True)
class LoggedPush:
    """A push that was applied, the ``made``-th of the range."""

    worker: int
    number: int
    made: int
    entries: Tensor


@final
class RangeState:
    """One copy of the range of a server. ``number``: the range's. The caller sees to the order of changes."""

    def __init__(self, extent: StoreSpec, number: int, contents: Contents, *, done: int = 0) -> None:
        self.extent, self.number = extent, number
        self.range = Range(extent, number, chunk_bytes=RUN_BYTES)
        self.shard_count = self.range.last - self.range.first
        self.lock = threading.Lock()
        """Held while a few shards change, or are copied."""
        self._rooms: dict[int, Tensor] = {}
        self.put(contents, done=done)

    def put(self, contents: Contents, *, done: int, unpushed: Sequence[int] = ()) -> None:
        """Begin with these contents of the whole store, which have ``done`` updates behind them."""
        layout, shard_range = self.extent.layout, self.range
        self.flats = [shard_range.part_of(flat).clone() for flat in contents.data]
        last = min(shard_range.last, layout.shards)
        self.counts = [np.array(contents.counts[shard], dtype=np.float64) for shard in range(shard_range.first, last)]
        self.touched = torch.from_numpy(np.array(contents.touched, dtype=np.uint8))
        self.buffers = contents.buffers.clone() if shard_range.buffers else torch.zeros(0, dtype=torch.float64)
        self.versions = torch.zeros(self.shard_count, dtype=torch.int64)
        self.workers = {worker: WorkerState() for worker in range(self.extent.workers)}
        self.log: list[LoggedPush] = []
        self.base, self.pushes, self.pushed_batches = done, 0, 0
        self.queue = QueueState()
        self.queue.resume(done, unpushed)

    @property
    def done(self) -> int:
        """The number of updates that the range has behind it."""
        return self.base + self.pushed_batches

    # Pushes

    def gradient_memory(self, worker: int) -> Tensor:
        """Return the memory that this worker's gradients arrive in."""
        if worker not in self._rooms:
            self._rooms[worker] = torch.zeros_like(self.flats[0])
        return self._rooms[worker]

    def stage(self, worker: int, staged: StagedGradient) -> None:
        """Keep a push that has arrived whole."""
        self.workers[worker].staged = staged

    def apply(self, worker: int, copied: Copied | None = None, out: tuple[Tensor, Tensor] | None = None) -> None:
        """Apply the push of this worker that is kept, run of shards by run. ``out``: the new weights and buffers of the
        range are copied into these, and ``copied`` is called after each run."""
        state = self.workers[worker]
        staged = state.staged
        assert staged is not None, "a push is kept before it is applied"
        for first, last in self.range.chunks():
            with self.lock:
                self._update(staged, first, last)
                self.versions[first - self.range.first : last - self.range.first] += 1
                if out is not None:
                    self._copy(first, last, out)
            if copied is not None:
                copied(first, last)
        self.touched |= staged.used
        state.applied, state.staged = staged.number, None
        self.pushes += 1
        self.pushed_batches += len(staged.entries)
        self.log.append(LoggedPush(worker, staged.number, self.pushes, staged.entries))
        self.queue.mark_pushed(worker, staged.batches)
        if len(self.log) > self.extent.capacity * self.extent.workers:
            del self.log[0]

    def _update(self, staged: StagedGradient, first: int, last: int) -> None:
        layout, rule = self.extent.layout, self.extent.layout.rule
        if first >= layout.shards:
            self.buffers += staged.change
            return
        begin = layout.bounds[self.range.first]
        every = self.counts[first - self.range.first : last - self.range.first]
        count = updates_alike(rule, every) if layout.group_count == 1 and bool(staged.used.all()) else None
        if count is not None:
            parts, gradient = self._parts(staged, layout.bounds[first] - begin, layout.bounds[last] - begin)
            rule.apply(parts, parts, gradient, staged.hyper[0].tolist(), count)
            for counts in every if rule.counted else ():
                counts.fill(count + 1)
            return
        for shard in range(first, last):
            counts = self.counts[shard - self.range.first]
            for at, piece in enumerate(layout.pieces[shard]):
                if staged.used[piece.parameter]:
                    parts, gradient = self._parts(staged, piece.start - begin, piece.stop - begin)
                    rule.apply(parts, parts, gradient, staged.hyper[piece.group].tolist(), float(counts[at]))
                    counts[at] += 1

    def _parts(self, staged: StagedGradient, start: int, stop: int) -> tuple[list[Tensor], Tensor]:
        return [flat[start:stop] for flat in self.flats], staged.gradient[start:stop]

    # Pulls

    def _copy(self, first: int, last: int, out: tuple[Tensor, Tensor]) -> None:
        bounds, shards = self.extent.layout.bounds, self.extent.layout.shards
        if first >= shards:
            out[1].copy_(self.buffers)
            return
        begin = bounds[self.range.first]
        at = slice(bounds[first] - begin, bounds[last] - begin)
        out[0][at].copy_(self.flats[0][at])

    def copy_out(self, out: tuple[Tensor, Tensor], copied: Copied) -> Tensor:
        """Copy the weights and buffers of the range into these, run of shards by run; returns their versions."""
        found = torch.zeros_like(self.versions)
        for first, last in self.range.chunks():
            at = slice(first - self.range.first, last - self.range.first)
            with self.lock:
                self._copy(first, last, out)
                found[at] = self.versions[at]
            copied(first, last)
        return found

    # The whole

    def contents(self) -> dict[str, Tensor]:
        """Return copies of what the range holds, as tensors by name, and what is known of the workers."""
        found = {f"data/{at}": flat for at, flat in enumerate(self.flats)}
        found["counts"] = torch.from_numpy(np.concatenate([np.zeros(0), *self.counts]))
        found |= {"touched": self.touched, "buffers": self.buffers, "versions": self.versions}
        state_json: dict[str, Any] = {"base": self.base, "pushes": self.pushes, "batches": self.pushed_batches}
        state_json["queue"] = self.queue.to_json()
        state_json["seats"] = {
            str(worker): [state.incarnation, state.applied] for worker, state in self.workers.items()
        }
        found["json"] = _text(state_json)
        return found

    def log_tensors(self) -> dict[str, Tensor]:
        """Return the log of the range as tensors by name. ValueError where its beginning was overwritten."""
        if len(self.log) < self.pushes:
            raise ValueError(f"the log has room for {len(self.log)} pushes, and there were {self.pushes}")
        rows = [[p.worker, p.number, p.made, len(p.entries)] for p in self.log]
        entries = [p.entries for p in self.log]
        none = torch.zeros(0, VERSIONS + self.shard_count, dtype=torch.int64)
        return {
            "log": torch.tensor(rows, dtype=torch.int64).view(len(rows), 4),
            "entries": torch.cat(entries) if entries else none,
        }

    def dump(self) -> Tensor:
        """Return everything as bytes, for a server that takes up the copy."""
        found = self.contents()
        kept = {f"staged/{worker}": state.staged for worker, state in self.workers.items() if state.staged is not None}
        for name, staged in kept.items():
            found |= {f"{name}/{at}": tensor for at, tensor in enumerate(staged.tensors)}
        found |= self._log_or_nothing()
        return packed(found)

    def _log_or_nothing(self) -> dict[str, Tensor]:
        try:
            return self.log_tensors()
        except ValueError:  # what is overwritten is not handed on either
            return {}

    def restore(self, blob: Tensor) -> None:
        """Become what another server's ``dump`` says."""
        given = unpacked(blob)
        state_json = state_json_of(given)
        self.flats = [given[f"data/{at}"] for at in range(len(self.flats))]
        sizes = [len(counts) for counts in self.counts]
        self.counts = [part.numpy() for part in given["counts"].split(sizes)]
        self.touched, self.buffers, self.versions = given["touched"], given["buffers"], given["versions"]
        self.base, self.pushes, self.pushed_batches = state_json["base"], state_json["pushes"], state_json["batches"]
        self.queue = QueueState.from_json(state_json["queue"])
        self.workers = {
            int(worker): WorkerState(incarnation, applied)
            for worker, (incarnation, applied) in state_json["seats"].items()
        }
        for worker, state in self.workers.items():
            if f"staged/{worker}/0" in given:
                room = self.gradient_memory(worker)
                entries, hyper, used, change, gradient = (given[f"staged/{worker}/{at}"] for at in range(5))
                room.copy_(gradient)
                state.staged = StagedGradient(state.applied + 1, entries, hyper, used, change, room)
        self.log = []
        if "log" in given:
            rows = given["log"].tolist()
            parts = given["entries"].split([row[3] for row in rows]) if rows else ()
            for (worker, number, made, _), part in zip(rows, parts, strict=True):
                self.log.append(LoggedPush(worker, number, made, part))

    @property
    def most_bytes(self) -> int:
        """The most bytes that a ``dump`` of this range has."""
        flats = sum(flat.nbytes for flat in self.flats) + self.flats[0].nbytes * self.extent.workers
        row = 8 * (VERSIONS + self.shard_count + 8)
        rows = self.extent.capacity * self.extent.workers + 2 * self.extent.batches + len(self.log)
        return 2 * flats + row * rows + (64 << 20)


@dataclass(frozen=True)
class Collected:
    """What the servers hold together, read at one moment."""

    done: int
    contents: Contents
    queue: QueueState = field(default_factory=QueueState)


def collect(extent: StoreSpec, parts: Sequence[dict[str, Tensor]]) -> Collected:
    """Put together what ``contents`` of each range says."""
    count = sum(1 for name in parts[0] if name.startswith("data/"))
    data = [torch.cat([part[f"data/{at}"] for part in parts]) for at in range(count)]
    counts: list[Any] = []
    for number, part in enumerate(parts):
        shard_range = Range(extent, number)
        sizes = [
            len(extent.layout.pieces[shard])
            for shard in range(shard_range.first, min(shard_range.last, extent.layout.shards))
        ]
        counts += [one.numpy() for one in part["counts"].split(sizes)]
    touched = torch.stack([part["touched"] for part in parts]).amax(0).numpy().astype(bool)
    buffers = torch.cat([part["buffers"] for part in parts])
    state_json = state_json_of(parts[0])
    return Collected(
        state_json["base"] + state_json["batches"],
        Contents(data, counts, touched, buffers),
        QueueState.from_json(state_json["queue"]),
    )


def state_json_of(given: dict[str, Tensor]) -> dict[str, Any]:
    """Return the plain data that ``contents`` has among its tensors."""
    found: dict[str, Any] = json.loads(bytes(given["json"].numpy()))
    return found


def _text(state_json: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state_json).encode()), dtype=torch.uint8)


def packed(tensors: dict[str, Tensor]) -> Tensor:
    """Return tensors by name as bytes, which run no code where they are read."""
    return torch.frombuffer(bytearray(save({name: t.contiguous() for name, t in tensors.items()})), dtype=torch.uint8)


def unpacked(blob: Tensor) -> dict[str, Tensor]:
    """Return the tensors that ``packed`` has written."""
    found: dict[str, Tensor] = load(bytes(blob.numpy()))
    return found
