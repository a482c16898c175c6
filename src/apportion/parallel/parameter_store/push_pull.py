"""The pulls and pushes of a worker: it pulls weights, computes the gradients of some batches on them, and pushes what
they add up to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from apportion.core.data.batch import Batch
from apportion.parallel.parameter_store.push_store import PushStore
from apportion.parallel.parameter_store.worker_model import StoreWorker

Mode = Literal["sharded", "hogwild", "ordered"]


@dataclass(frozen=True)
class PushPullSchedule:
    """The number of batches after which a worker pushes and pulls, and the number of pushes by which it may be ahead of
    the slowest."""

    mode: Mode = "sharded"
    push_every: int = 1
    pull_every: int = 1
    max_staleness: int | None = None


@final
class PushPull:
    """One worker's pulls and pushes, and the gradient that waits in between."""

    def __init__(self, store: PushStore, worker: StoreWorker, schedule: PushPullSchedule) -> None:
        self._store, self._worker, self._schedule = store, worker, schedule
        self._ordered = schedule.mode == "ordered"
        self._gradients = worker.layout.views(store.gradient)
        self.loss: Tensor | None = None
        """The loss of the batch that was computed last."""
        self.staleness = torch.zeros((), dtype=torch.float64)
        """The staleness of the last push."""
        self.seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the gradient that waits to be pushed, and what was pulled for it."""
        self._accrued: list[bool] | None = None
        """Flags that say which parameters have a gradient that is not pushed yet; None: there is none at all."""
        self._since_push = self._since_pull = 0
        self.fresh = False
        """Tells whether the weights are as they were pulled."""

    @property
    def is_due(self) -> bool:
        """Tells whether as many batches have accrued as a push is made of."""
        return self._since_push >= self._schedule.push_every

    def pull(self) -> None:
        """Pull the last weights and buffers into the model."""
        began = time.perf_counter()
        self._store.pull()
        self._worker.set_buffers(self._store.buffers)
        self.fresh = True
        self.seconds += time.perf_counter() - began

    def compute(self, batch: Batch) -> Tensor:
        """Add the gradient of a batch to what has accrued, and return its loss; the weights are pulled before, where
        that is due."""
        store, worker = self._store, self._worker
        pulls = self._since_pull == 0 or self.fresh
        if self._since_pull == 0 and not self.fresh:
            self.pull()
        store.queue.record_versions(store.pulled if pulls else None)
        self.fresh = False
        first = self._accrued is None
        alone = self._schedule.pull_every > 1
        self.loss, used = worker.compute(batch, self._gradients, store.change, first=first, alone=alone)
        if self._accrued is None:
            self._accrued = used
        else:
            self._accrued = [a or b for a, b in zip(self._accrued, used, strict=True)]
        self._last_batch = batch.step
        self._since_push += 1
        self._since_pull = (self._since_pull + 1) % self._schedule.pull_every
        return self.loss

    def push(self, batch: int) -> None:
        """Push what has accrued, with the hyperparameters that belong to this number of updates."""
        began = time.perf_counter()
        used = None if self._accrued is None or all(self._accrued) else self._accrued
        pulls = self._since_pull == 0 and not self._ordered
        stale = self._store.push(self._worker.hyper.at(batch), used=used, pull=pulls)
        self.staleness = torch.tensor(stale, dtype=torch.float64)
        self._accrued, self._since_push = None, 0
        if pulls:
            self._worker.set_buffers(self._store.buffers)
            self.fresh = True
        if self._schedule.max_staleness is not None or self._ordered:
            self._store.queue.wake_all()
        self.seconds += time.perf_counter() - began

    def push_rest(self) -> None:
        """Push what has accrued, where there is something."""
        if self._accrued is not None:
            self.push(self._last_batch)
