"""The step of one device: the specification that exact strategies are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from apportion.batch import Batch, Batches
from apportion.deal import DataShard
from apportion.parallel.replica import Replica, seed_everything
from apportion.strategy import State, Step, batches
from apportion.workload import Workload


@final
class OneDeviceStep(Step):
    """The whole batch, forward, backward and update, in this process."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._replica = Replica(workload, rank=0, device=device)
        self.rank, self.device = 0, device
        self.model, self.optimizers = self._replica.model, self._replica.optimizers
        self.data_shard = DataShard()
        seed_everything(workload.seed)
        self.source = Batches(workload, device=device, dtype=self._replica.input_dtype)
        self._replica.start_schedules(self.source.total)
        self._update, self._count = workload.update, workload.count
        self._loss: Tensor | None = None

    @property
    def done(self) -> int:
        return self._replica.step

    def predict(self, batch: Batch) -> Any | None:
        return self._replica.predict(batch)

    def backward(self, batch: Batch) -> Tensor:
        replica = self._replica
        replica.reseed(batch.step)
        with replica.autocast():
            loss = replica.loss(replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        self._loss = loss.detach()
        return self._loss

    def update(self) -> Mapping[str, Tensor]:
        replica = self._replica
        for name in self.optimizers:
            replica.apply(name)
        replica.commit()
        assert self._loss is not None, "update() follows backward()"
        return {"loss": self._loss}

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        self._replica.gradient(loss, 1.0, optimizer)
        self._replica.apply(optimizer)
        return loss.detach()

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        if self._update is None:
            self.backward(batch)
            return self.update()
        self._replica.reseed(batch.step)
        with self._replica.autocast():
            values = self._update(self, batch)
        self._replica.commit()
        return {name: value.detach() for name, value in values.items()}

    def state_dict(self) -> State:
        return self._replica.state()

    def load_state_dict(self, state: State) -> None:
        self._replica.load(state, slice(0, self.source.deal.batch_size))

    def committed(self) -> State | None:
        return self._replica.committed()

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": 0.0, "updating": self._replica.seconds}

    def close(self) -> None:
        pass


def reference(workload: Workload) -> Iterator[State]:
    """The state after each step of one device on the CPU: what every exact strategy must compute."""
    step = OneDeviceStep(workload, torch.device("cpu"))
    for batch in batches(step):
        step(batch)
        yield step.state_dict()
