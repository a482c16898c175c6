"""The references for asynchronous runs, each in one process: ``ordered_reference`` computes ordered mode with torch's
own optimizer, and ``replay`` repeats the pushes of a run from its log, to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from apportion.core.data.source import BatchSource
from apportion.core.rng import seed_everything
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.parameter_store.push_log import Pushed, PushLog
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker, refuse
from apportion.parallel.replica.replica import Replica

CPU = torch.device("cpu")


def ordered_reference(workload: Workload, workers: int) -> Iterator[State]:
    """Yield the state after each update of ``mode="ordered"``, computed by torch's own optimizer: of each round of as
    many batches as there are workers, every gradient is that of the weights the round begins with; they are applied one
    after the other, in rank order. Buffers take the change of each forward pass. One worker: the one-device step."""
    refuse(workload)
    replica = Replica(replace(workload, clip_grad_norm=None), rank=0, device=CPU)
    seed_everything(workload.seed)
    source = BatchSource(workload, device=CPU, dtype=replica.input_dtype)
    source.count_for(replica.model)
    source.acts(replica.model)
    replica.start_schedules(source.total, source.deal.batches)
    for first in range(0, source.total, workers):
        round_ = range(first, min(first + workers, source.total))
        computed = []
        for worker, number in enumerate(round_):
            source.act_as(worker)
            computed.append(_gradient(replica, source, number, workload.clip_grad_norm))
        for gradients, changes in computed:
            for p, gradient in zip(replica.trainable(), gradients, strict=True):
                p.grad = gradient
            for name in replica.optimizers:
                replica.apply(name)
            buffers = _buffers(replica)
            moved = [buffer.to(torch.float64) + change for buffer, change in zip(buffers, changes, strict=True)]
            for buffer, value in zip(buffers, moved, strict=True):  # then only: some may lie in one memory
                buffer.copy_(value)
            replica.commit()
            yield replica.state()


def _gradient(
    replica: Replica, source: BatchSource, number: int, clip: float | None
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Compute the gradients of one batch, and what its forward pass changes of the buffers, which are then set back."""
    batch = source.at(number, WHOLE)
    before = [b.clone() for b in _buffers(replica)]
    replica.reseed(batch.step)
    with replica.autocast():
        loss = replica.loss(replica.outputs(batch), batch.targets)
    replica.backward(loss, 1.0)
    parameters = replica.trainable()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, clip)
    gradients = [p.grad for p in parameters]
    for p in replica.model.parameters():
        p.grad = None
    after = _buffers(replica)
    changes = [a.to(torch.float64) - b.to(torch.float64) for a, b in zip(after, before, strict=True)]
    for buffer, was in zip(after, before, strict=True):
        buffer.copy_(was)
    return gradients, changes


def _buffers(replica: Replica) -> list[Tensor]:
    """Return the tensors that a forward pass may change."""
    return [place.tensor.detach() for place in replica.forward.places]


EVERY_BATCH = PushPullSchedule()
"""The schedule that pushes after every batch, and pulls before it."""


def replay(
    workload: Workload, log: PushLog, rhythm: PushPullSchedule = EVERY_BATCH, *, start: State | None = None
) -> State:
    """Return the state that the pushes of a log lead to, from the beginning or from ``start``. It equals that of the
    run to the last bit, where the run's workers had as many threads as this process. ValueError for ``mode="hogwild"``,
    and where the log is not whole or not one run's."""
    if rhythm.mode == "hogwild":
        raise ValueError('mode="hogwild" cannot be replayed: nothing says which numbers a push has seen; use "sharded"')
    return _Replay(workload, log, rhythm, start).run()


@dataclass
class _Computed:
    """A push with its gradient, until every shard has it."""

    pushed: Pushed
    gradient: Tensor
    change: Tensor
    used: list[bool]
    hyper: Sequence[Sequence[float]]


@dataclass
class _Shard:
    """A shard's last version, and older ones on which a batch has yet to be computed."""

    order: list[tuple[int, int]]
    """The (worker, number) of the push that made version 1, 2, ..."""
    version: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)
    needed: Counter[int] = field(default_factory=Counter)

    def take_version(self, version: int) -> Tensor:
        """Return a version for one of the batches that need it; the version is dropped after the last of them."""
        found = self.kept[version]
        self.needed[version] -= 1
        self._drop(version)
        return found

    def put(self, values: Tensor) -> None:
        """Set the next version of the shard."""
        self.version += 1
        self.kept[self.version] = values
        self._drop(self.version - 1)

    def _drop(self, version: int) -> None:
        if version != self.version and self.needed[version] <= 0:
            self.kept.pop(version, None)


class _Replay:
    def __init__(self, workload: Workload, log: PushLog, rhythm: PushPullSchedule, start: State | None) -> None:
        self._worker = worker = StoreWorker(workload, CPU)
        self._alone = rhythm.pull_every > 1
        self._layout = worker.layout
        begin = 0 if start is None else start.step
        if log.first != begin:
            raise ValueError(
                f"the log begins after {log.first} updates: give start=, the state that the run began with"
            )
        self._now = worker.initial() if start is None else worker.load(start)
        self._done = begin
        self._waiting: dict[int, list[Pushed]] = {}
        pushed_batches: Counter[int] = Counter()
        for pushed in log.pushes():
            self._waiting.setdefault(pushed.worker, []).append(pushed)
            pushed_batches.update(batch for batch, _ in pushed.batches)
        if twice := [batch for batch, count in pushed_batches.items() if count > 1]:
            raise ValueError(f"the log is not one run's: batch {twice[0]} was pushed more than once")
        self._shards = [self._shard(s) for s in range(self._layout.shards + (worker.buffer_numbers > 0))]
        self._computed: dict[tuple[int, int], _Computed] = {}
        self._local: dict[int, tuple[Tensor, Tensor]] = {}

    def _shard(self, number: int) -> _Shard:
        pushes = [p for of in self._waiting.values() for p in of]
        order = sorted(pushes, key=lambda p: p.made[number])
        if [p.made[number] for p in order] != list(range(1, len(order) + 1)):
            raise ValueError(f"the log is not whole: shard {number} has updates that no push in it has made")
        shard = _Shard([(p.worker, p.number) for p in order])
        shard.kept[0] = self._values(number).clone()
        for pushed in pushes:
            shard.needed.update(versions[number] for _, versions in pushed.batches if versions is not None)
        return shard

    def _values(self, shard: int) -> Tensor:
        if shard == self._layout.shards:
            return self._now.buffers
        return self._now.data[0][self._layout.bounds[shard] : self._layout.bounds[shard + 1]]

    def run(self) -> State:
        """Compute every gradient that can be computed, and apply it to the shards whose turn it is, until the log is
        used up. ValueError where the log is not whole."""
        while any(self._waiting.values()) or self._computed:
            moved = self._compute_next()
            for number in range(len(self._shards)):
                moved |= self._apply_next(number)
            self._forget()
            if not moved:
                raise ValueError("the log is not whole: a gradient was computed on weights that no push has made")
        return self._worker.state(self._done, self._now)

    def _compute_next(self) -> bool:
        moved = False
        for waiting in self._waiting.values():
            while waiting and self._can_compute(waiting[0]):
                pushed = waiting.pop(0)
                self._computed[pushed.worker, pushed.number] = self._compute(pushed)
                self._done += len(pushed.batches)
                moved = True
        return moved

    def _can_compute(self, pushed: Pushed) -> bool:
        latest = [shard.version for shard in self._shards]
        asked = [versions for _, versions in pushed.batches if versions is not None]
        return all(v <= now for versions in asked for v, now in zip(versions, latest, strict=True))

    def _compute(self, pushed: Pushed) -> _Computed:
        worker, layout = self._worker, self._layout
        gradient, change = torch.zeros_like(worker.weights), torch.zeros(worker.buffer_numbers, dtype=torch.float64)
        views, used = layout.views(gradient), [False] * len(layout.parameters)
        for at, (batch, versions) in enumerate(pushed.batches):
            if versions is not None:
                self._pull(versions)
            else:
                weights, buffers = self._local[pushed.worker]
                worker.weights.copy_(weights)
                worker.set_buffers(buffers)
            worker.source.act_as(pushed.worker)
            taken = worker.source.at(batch, WHOLE)
            _, had = worker.compute(taken, views, change, first=at == 0, alone=self._alone)
            used = [a or b for a, b in zip(used, had, strict=True)]
            self._now.touched[used] = True
            if self._alone:
                buffers = worker.model.read_buffers(torch.empty_like(change))
                self._local[pushed.worker] = worker.weights.clone(), buffers
        return _Computed(pushed, gradient, change, used, worker.hyper.at(pushed.batches[-1][0]))

    def _pull(self, versions: Sequence[int]) -> None:
        for number, version in enumerate(versions):
            values = self._shards[number].take_version(version)
            if number == self._layout.shards:
                self._worker.set_buffers(values)
            else:
                self._worker.weights[self._layout.bounds[number] : self._layout.bounds[number + 1]] = values

    def _apply_next(self, number: int) -> bool:
        """Apply every push that is computed and whose turn it is to one shard; returns whether there was one."""
        shard, before = self._shards[number], self._shards[number].version
        while shard.version < len(shard.order) and shard.order[shard.version] in self._computed:
            computed = self._computed[shard.order[shard.version]]
            if number == self._layout.shards:
                self._now.buffers.add_(computed.change)
            else:
                self._apply(number, computed)
            shard.put(self._values(number).clone())
        return shard.version > before

    def _apply(self, number: int, computed: _Computed) -> None:
        for at, piece in enumerate(self._layout.pieces[number]):
            if computed.used[piece.parameter]:
                parts = [flat[piece.start : piece.stop] for flat in self._now.data]
                gradient, count = computed.gradient[piece.start : piece.stop], float(self._now.counts[number][at])
                self._layout.rule.apply(parts, parts, gradient, computed.hyper[piece.group], count)
                self._now.counts[number][at] += 1

    def _forget(self) -> None:
        """Drop the gradients of pushes that every shard has."""
        for key, computed in list(self._computed.items()):
            if all(shard.version >= computed.pushed.made[n] for n, shard in enumerate(self._shards)):
                del self._computed[key]
