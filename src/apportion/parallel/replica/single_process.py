"""The step of one device: the specification that exact strategies are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Step, batches
from apportion.core.workload import Workload
from apportion.parallel.optim.closure import Closure
from apportion.parallel.replica.replica import Replica


@final
class OneDeviceStep(Step):
    """The whole batch, forward, backward and update, in this process."""

    def __init__(self, workload: Workload, device: torch.device, rank: int = 0, *, alone: bool = False) -> None:
        """Build the step. ``alone``: this is the only rank, so that no other has to know of a weight that thaws."""
        self.replica = Replica(workload, rank=rank, device=device)
        if alone:
            self.replica.may_thaw()
        self.rank, self.device = rank, device
        self.model, self.optimizers = self.replica.model, self.replica.optimizers
        self.data_shard = DataShard()
        seed_everything(workload.seed)
        self.source = BatchSource(workload, device=device, dtype=self.replica.input_dtype, rank=rank)
        self.replica.start_schedules(self.source.total)
        self._update, self._count = workload.update, workload.count
        self._loss: Tensor | None = None
        self._batch: Batch | None = None

    @property
    def done(self) -> int:
        return self.replica.step

    def predict(self, batch: Batch) -> Any | None:
        return self.replica.predict(batch)

    def looked(self) -> None:
        self.replica.forward.put_back()

    def backward(self, batch: Batch) -> Tensor:
        replica = self.replica
        replica.reseed(batch.step)
        with replica.autocast():
            loss = replica.loss(replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        self._loss, self._batch = loss.detach(), batch
        return self._loss

    def update(self) -> Mapping[str, Tensor]:
        replica, loss = self.replica, self._loss
        assert loss is not None, "update() follows backward()"
        for name in self.optimizers:
            if name in replica.searching:
                replica.search(name, Closure(loss, replica.trainable(name), self._again))
            else:
                replica.apply(name)
        replica.commit()
        self._batch = None
        return {"loss": loss}

    def _again(self) -> Tensor:
        assert self._batch is not None, "update() follows backward()"
        return self.backward(self._batch)

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        self.replica.gradient(loss, 1.0, optimizer)
        self.replica.apply(optimizer)
        return loss.detach()

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        if self._update is None:
            self.backward(batch)
            return self.update()
        self.replica.reseed(batch.step)
        with self.replica.autocast():
            values = self._update(self, batch)
        self.replica.commit()
        return {name: value.detach() for name, value in values.items()}

    def state_dict(self) -> State:
        return self.replica.state()

    def load_state_dict(self, state: State) -> None:
        self.replica.load(state, slice(0, self.source.deal.batch_size))

    def committed(self) -> State | None:
        return self.replica.committed()

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": 0.0, "updating": self.replica.seconds}

    def close(self) -> None:
        pass


def reference(workload: Workload) -> Iterator[State]:
    """The state after each step of one device on the CPU: what every exact strategy must compute."""
    step = OneDeviceStep(workload, torch.device("cpu"), alone=True)
    for batch in batches(step):
        step(batch)
        yield step.state_dict()
