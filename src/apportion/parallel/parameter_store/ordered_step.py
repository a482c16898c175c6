"""A worker of Downpour SGD in ordered mode: all compute a round of batches on the same weights, and push in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from apportion.core.strategy import State
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.push_pull_step import OrderedRounds
from apportion.parallel.parameter_store.worker_step import COMMITTED_SECONDS, StoreStep


@final
class OrderedStep(OrderedRounds, StoreStep):
    """The step of a worker in ordered mode: every rank takes part in every batch, and only its owner has rows of it."""

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

    @property
    def _workers(self) -> Sequence[int]:
        return range(self._member.world.size)

    def _meet_round(self, number: int) -> None:
        self.store.deal.enter_round(number)

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
