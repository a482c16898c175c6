"""A worker of Downpour SGD in ordered mode: all compute a round of batches on the same weights, and push in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch, Whole
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.worker_model import WHOLE
from apportion.parallel.parameter_store.worker_step import COMMITTED_SECONDS, StoreStep


@final
class OrderedStep(StoreStep):
    """The step of a worker in ordered mode: every rank takes part in every batch, and only its owner has rows of it."""

    lockstep = True

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, *, servers: int = 0) -> None:
        super().__init__(workload, world, schedule, servers=servers)
        self._base = self._number = 0
        """The update that the first round begins with, and the next one."""
        self._own: Tensor | None = None
        """The loss of this rank's batch of the round, whose gradient waits for its turn."""

    def _forget(self) -> None:
        super()._forget()
        self._own = None

    def _meet(self) -> None:
        group = self._member.world.group()
        self.store.deal.begin_rounds()
        group.barrier()
        self._base = self._number = self.store.done
        group.barrier()

    @property
    def done(self) -> int:
        # This rank's own count: another may have made the next update by now.
        return self._number if self._member.entered else self.store.done

    def _next(self) -> Batch | None:
        number = self.done
        if number >= self.source.total:
            return None
        batch = self.source.at(number, WHOLE)
        if self._owner(number) == self.rank:
            return batch
        whole = Whole(number, batch.epoch, batch.size, batch.start, int(batch.index[0]))
        return Batch(self.source, whole, index=batch.index[:0], rows=slice(batch.size, batch.size))

    def _owner(self, number: int) -> int:
        return (number - self._base) % self._member.world.size

    def backward(self, batch: Batch) -> Tensor | None:
        if self._own is None and self._owner(batch.step) == 0:
            own = batch.step + self.rank
            if own < self.source.total:  # all ranks compute now, on the weights that the round begins with
                self.store.deal.open(own)
                self._own = self._cycle.compute(self.source.at(own, WHOLE) if len(batch) == 0 else batch)
            self.store.deal.enter_round(batch.step)
        return self._own if len(batch) else None

    def update(self) -> Mapping[str, Tensor]:
        batch = self._taken
        assert batch is not None, "update() follows backward()"
        values = self._update_in_turn(batch.step, len(batch) > 0)
        self._taken = None
        return values

    def _update_in_turn(self, number: int, own: bool) -> Mapping[str, Tensor]:
        store, workers = self.store, self._member.workers
        report = store.memory.reports[workers[self._owner(number)]]
        if own:
            assert self._own is not None
            store.deal.wait(lambda: store.deal.all_entered(workers), lambda: "every rank to pull")
            report.loss, report.staleness = float(self._own), float(self._owner(number))
            self._cycle.push(number)
            self._own = None
        else:
            store.deal.wait(lambda: store.done > number, lambda: f"rank {self._owner(number)} to push batch {number}")
        self._number = number + 1
        return {"loss": torch.tensor(report.loss), "staleness": torch.tensor(report.staleness, dtype=torch.float64)}

    def state_dict(self) -> State:
        self._enter()
        with self._lock:
            state = self._worker.state(self.done, self.store.read())
        self._member.world.group().barrier()  # no rank goes on while another still reads
        return state

    def committed(self) -> State | None:
        if not self._member.entered:
            return None
        try:
            found = self.store.snapshot(lambda: None, COMMITTED_SECONDS)  # in the middle of an update: its end is near
        except PeerLost:
            return None
        return self._state_of(replace(found, unpushed=[]))

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._base = self._number = state.step
