"""A rank in ordered mode whose hosts are several: all workers compute a round of batches on the same weights, and push
in turn, to servers on other hosts.

Every rank takes part in every step, servers too, so that the ranks are at one point whenever the network is evaluated
or saved. A server has no rows of a batch, and its part of the rows of an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.parameter_store.network.network_step import NetworkPlaces, NetworkWorkerStep, served, spec_of
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.push_pull_step import OrderedRounds


@final
class OrderedNetworkStep(OrderedRounds, NetworkWorkerStep):
    """The step of a worker, or of a server, in ordered mode."""

    ends_together = True

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, places: NetworkPlaces) -> None:
        super().__init__(workload, world, schedule, places)
        self._servers = None
        if world.rank in places.servers:
            contents = self._worker.initial()
            self._servers = served(self._doors, spec_of(self._worker, places), places, lambda: contents)
            self._servers.start()

    def _enter(self) -> None:
        if not self._entered and self._servers is not None:
            self._entered = True  # a server is not a worker
        super()._enter()

    @property
    def done(self) -> int:
        return self._number

    @property
    def _workers(self) -> Sequence[int]:
        return self.places.workers

    def _meet_round(self, number: int) -> None:
        self._world.group().barrier()

    def _update_in_turn(self, number: int, own: bool) -> Mapping[str, Tensor]:
        values = torch.zeros(2, dtype=torch.float64)
        if own:
            assert self._own is not None
            self._cycle.push(number)
            values[0], values[1] = float(self._own), float(self._turn(number))
            self._own = None
        self._world.group().broadcast(values, source=self._owner(number))
        self._number = number + 1
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
