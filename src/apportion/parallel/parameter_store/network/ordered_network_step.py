"""A rank in ordered mode whose hosts are several: all workers compute a round of batches on the same weights, and push
in turn, to servers on other hosts.

Every rank takes part in every step, servers too, so that the ranks are at one point whenever the network is evaluated
or saved. A server has no rows of a batch, and its part of the rows of an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch, Whole
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.parameter_store.network.network_step import NetworkPlaces, NetworkWorkerStep, served, spec_of
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.worker_model import WHOLE


@final
class OrderedNetworkStep(NetworkWorkerStep):
    """The step of a worker, or of a server, in ordered mode."""

    lockstep = True
    ends_together = True

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, places: NetworkPlaces) -> None:
        super().__init__(workload, world, schedule, places)
        self._servers = None
        if world.rank in places.servers:
            contents = self._worker.initial()
            self._servers = served(self._doors, spec_of(self._worker, places), places, lambda: contents)
            self._servers.start()
        self._base = self._number = 0
        """The update that the first round begins with, and the next one."""
        self._own: Tensor | None = None
        """The loss of this rank's batch of the round, whose gradient waits for its turn."""

    def _enter(self) -> None:
        if not self._entered and self._servers is not None:
            self._entered = True  # a server is not a worker
        super()._enter()

    def _forget(self) -> None:
        super()._forget()
        self._own = None

    @property
    def done(self) -> int:
        return self._number

    def take(self) -> Batch | None:
        self._enter()
        number = self._number
        if self._taken is None and number < self.source.total:
            batch = self.source.at(number, WHOLE)
            if self._owner(number) != self.rank:
                whole = Whole(number, batch.epoch, batch.size, batch.start, int(batch.index[0]))
                batch = Batch(self.source, whole, index=batch.index[:0], rows=slice(batch.size, batch.size))
            self._taken = batch
        return self._taken

    def _owner(self, number: int) -> int:
        """Return the rank whose batch this is."""
        workers = self.places.workers
        return workers[(number - self._base) % len(workers)]

    def backward(self, batch: Batch) -> Tensor | None:
        workers = self.places.workers
        if self._own is None and (batch.step - self._base) % len(workers) == 0:
            if self.rank in workers:
                own = batch.step + workers.index(self.rank)
                if own < self.source.total:  # all workers compute now, on the weights that the round begins with
                    self.store.open(own)
                    self._own = self._cycle.compute(self.source.at(own, WHOLE) if len(batch) == 0 else batch)
            self._world.group().barrier()  # a push before that would change the weights that others pull
        return self._own if len(batch) else None

    def update(self) -> Mapping[str, Tensor]:
        batch = self._taken
        assert batch is not None, "update() follows backward()"
        owner = self._owner(batch.step)
        values = torch.zeros(2, dtype=torch.float64)
        if owner == self.rank:
            assert self._own is not None
            self._cycle.push(batch.step)
            values[0], values[1] = float(self._own), float(self.places.workers.index(owner))
            self._own = None
        self._world.group().broadcast(values, source=owner)
        self._number = batch.step + 1
        self._taken = None
        return {"loss": values[0].to(torch.float32), "staleness": values[1]}

    def state_dict(self) -> State:
        state = super().state_dict()
        state.settings["unpushed"] = []
        self._world.group().barrier()  # no rank goes on while another still reads
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._base = self._number = state.step

    def close(self) -> None:
        super().close()
        if self._servers is not None:
            self._servers.close()
