"""The step of one device: the specification that exact strategies are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.strategy import State, batches
from apportion.core.workload import Workload
from apportion.parallel.replica.step import ReplicaStep


class OneDeviceStep(ReplicaStep):
    """The whole batch, forward, backward and update, in this process."""

    repeats = True

    def __init__(self, workload: Workload, device: torch.device, rank: int = 0, *, alone: bool = False) -> None:
        """Build the step. ``alone``: this is the only rank, so that no other has to know of a weight that thaws."""
        super().__init__(workload, World(rank=rank, device=device))
        if alone:
            self._replica.trained.may_thaw()

    def backward(self, batch: Batch) -> Tensor:
        replica = self._replica
        replica.reseed(batch.step)
        with replica.autocast():
            loss = replica.loss(replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        self._loss, self._batch = loss.detach(), batch
        return self._loss

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        self._replica.gradient(loss, 1.0, optimizer)
        self._replica.apply(optimizer)
        return loss.detach()

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        if self._workload.update is None:
            self.backward(batch)
            return self.update()
        self._replica.reseed(batch.step)
        with self._replica.autocast():
            values = self._workload.update(self, batch)
        self._replica.commit()
        return {name: value.detach() for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class ReferenceState(State):
    """The state after a step of one device, with what else a step of any strategy must have in common with it."""

    values: Mapping[str, Tensor]
    """The named values that the step has returned."""
    maker: OneDeviceStep
    """The step that is at this state: what it predicts, and whether it goes on from a state that is loaded."""


def reference(workload: Workload) -> Iterator[State]:
    """The state after each step of one device on the CPU: what every exact strategy must compute."""
    step = OneDeviceStep(workload, torch.device("cpu"), alone=True)
    for batch in batches(step):
        values = step(batch)
        yield ReferenceState(**vars(step.state_dict()), values=values, maker=step)
