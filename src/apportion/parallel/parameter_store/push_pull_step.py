"""The steps of the workers of a parameter store, in what does not depend on where the shards lie.

``PushPullStep`` is a worker that pulls, computes and pushes. ``OrderedRounds`` adds the rounds of ordered mode. Each
has one subclass whose store is in memory of the host (``worker_step.py``), and one whose servers are on other hosts
(``network/network_step.py``)."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch, Whole
from apportion.core.strategy import Step
from apportion.parallel.parameter_store.push_pull import PushPull, PushPullSchedule
from apportion.parallel.parameter_store.push_store import PushStore
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker


class PushPullStep(Step):
    """The training step of one worker, which pulls, computes and pushes batch by batch."""

    store: PushStore

    def _set_model(self, worker: StoreWorker, world: World) -> None:
        """Set what every step has: the model of the worker, its optimizers and its batches."""
        self._worker = worker
        self.device, self.rank = world.device, world.rank
        self.model, self.optimizers = worker.replica.model, worker.replica.optimizers
        self.source, self.data_shard = worker.source, WHOLE

    def _set_cycle(self, schedule: PushPullSchedule) -> None:
        """Begin to push to, and pull from, ``store``."""
        self._cycle = PushPull(self.store, self._worker, schedule)
        self._taken: Batch | None = None
        """The batch that was handed out to this worker, and whose step is not done."""
        # The state is read for a checkpoint in a thread of its own while the next batch is computed.
        self._lock = threading.Lock()

    @abstractmethod
    def _enter(self) -> None:
        """Join the workers of the store, where this one has not joined yet."""

    def _forget(self) -> None:
        """Reset the step: no batch is taken, and no gradient waits to be pushed."""
        self._taken = None
        self._cycle.reset()

    def take(self) -> Batch | None:
        self._enter()
        if self._taken is None:
            self._taken = self._next()
        return self._taken

    @abstractmethod
    def _next(self) -> Batch | None:
        """Return the next batch of this worker; None where no more are left."""

    def predict(self, batch: Batch) -> Any | None:
        self._enter()
        if batch.start:  # one pass over the set is of one state of the weights
            self._cycle.pull()
            if self.lockstep:  # others may push before the round is over: the next one pulls for itself
                self._cycle.fresh = False
        return self._worker.replica.predict(batch) if len(batch) else None

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self.store.waited, "updating": self._cycle.seconds}


class OrderedRounds(PushPullStep):
    """A step in ordered mode: all workers compute a round of batches on the same weights, and push in turn. Every rank
    takes part in every batch, and only its owner has rows of it."""

    lockstep = True
    _base = 0
    """The update that the first round begins with."""
    _number = 0
    """The next update."""
    _own: Tensor | None = None
    """The loss of this rank's batch of the round, whose gradient waits for its turn."""

    @property
    @abstractmethod
    def _workers(self) -> Sequence[int]:
        """The ranks that compute, in the order in which they push."""

    @abstractmethod
    def _meet_round(self, number: int) -> None:
        """Have it known that this rank has pulled for the round that begins with this batch. A push before all ranks
        have would change the weights that the others pull."""

    @abstractmethod
    def _update_in_turn(self, number: int, own: bool) -> Mapping[str, Tensor]:
        """Push the gradient of this batch where it is this rank's ``own``, or wait until its owner has."""

    def _forget(self) -> None:
        super()._forget()
        self._own = None

    def _turn(self, number: int) -> int:
        """Return the place in its round of a batch."""
        return (number - self._base) % len(self._workers)

    def _owner(self, number: int) -> int:
        """Return the rank whose batch this is."""
        return self._workers[self._turn(number)]

    def _next(self) -> Batch | None:
        number = self.done
        if number >= self.source.total:
            return None
        batch = self.source.at(number, WHOLE)
        if self._owner(number) == self.rank:
            return batch
        whole = Whole(number, batch.epoch, batch.size, batch.start, int(batch.index[0]))
        return Batch(self.source, whole, index=batch.index[:0], rows=slice(batch.size, batch.size))

    def backward(self, batch: Batch) -> Tensor | None:
        if self._own is None and self._turn(batch.step) == 0:
            if self.rank in self._workers:
                own = batch.step + self._workers.index(self.rank)
                if own < self.source.total:  # all workers compute now, on the weights that the round begins with
                    self.store.queue.record_taken(own)
                    self._own = self._cycle.compute(self.source.at(own, WHOLE) if len(batch) == 0 else batch)
            # Also a rank without a batch of this round meets here: the first push of a round waits for every rank, and
            # a rank that stayed away would hold all others up for ever.
            self._meet_round(batch.step)
        return self._own if len(batch) else None

    def update(self) -> Mapping[str, Tensor]:
        batch = self._taken
        assert batch is not None, "update() follows backward()"
        values = self._update_in_turn(batch.step, len(batch) > 0)
        self._taken = None
        return values
