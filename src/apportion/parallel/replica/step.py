"""The steps of a rank that holds a whole replica of the network, and the specification that they are held to.

``ReplicaStep`` fixes the order of the calls in one update, for strategies to build on. ``OneDeviceStep`` is the whole
update in one process, and ``reference`` yields its states: what every exact strategy must compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.parts import learn_lengths, share_of
from apportion.core.python_state.python_state import PythonState
from apportion.core.replica_digest import Replicated
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Step, batches
from apportion.core.workload import Workload
from apportion.parallel.optim.closure import Closure
from apportion.parallel.optim.replica_optimizers import ReplicaOptimizers
from apportion.parallel.replica.accumulation import accumulated, refuse_accumulation
from apportion.parallel.replica.loss_weighting import LossShare
from apportion.parallel.replica.replica import Replica


class ReplicaStep(Step):
    """One update by ranks that each hold a replica of the network and compute a share of the batch.

    The calls of a step, in their order::

        backward(batch)   replica.reseed(batch.step)       what the model draws is a function of the step
                          replica.outputs(batch)           the forward pass of this rank's rows
                          replica.loss(outputs, targets)   their mean loss
                          replica.backward(loss, weight)   adds to p.grad, by the rows' weight in the whole batch
        update()          reduce_gradients(loss)           p.grad becomes the whole batch's, the same on every rank
                          replica.apply(name)              each optimizer and its schedule; p.grad is None again
                          replica.commit()                 the step is done: what the forward changed counts

    A strategy writes ``reduce_gradients``, and overrides ``prepare``, ``backward`` or ``update`` where it has to.
    """

    repeats: ClassVar[bool] = False
    """Does ``backward`` itself give the whole batch's gradient, so that an optimizer may call it again as its closure?
    Then ``backward`` keeps the batch in ``_batch``."""
    deals_parts: ClassVar[bool] = False
    """Does a rank need no rows but those of its share of each batch, so that it opens its own parts alone of a data set
    in parts? False: every rank opens all of them."""

    def __init__(self, workload: Workload, world: World) -> None:
        self.rank, self.device, self._group = world.rank, world.device, world.group()
        self._workload = workload
        dtype = torch.float64 if workload.precision == "float64" else None
        self.data_shard = self._make_data_shard(world)
        parts = None if self.data_shard.parts is None else workload.parted_data()
        if parts is not None:
            learn_lengths(parts, self.data_shard, world)
        self.source = BatchSource(workload, device=world.device, dtype=dtype, rank=world.rank, dataset=parts)
        self._replica = Replica(
            workload, rank=world.rank, device=world.device, data=self.source.dataset, prepare=self.prepare
        )
        self.model, self.optimizers = self._replica.model, self._replica.optimizers
        self.source.count_for(self.model)
        if not self.repeats:
            self.optimizers.refuse_searching()
        self.source.acts(self.model)
        self._replica.python.shares = self._group.size
        self._share = LossShare(self._replica, self._group)
        seed_everything(workload.seed)
        self._replica.start_schedules(self.source.total, self.source.deal.batches)
        self._batch: Batch | None = None
        self._loss: Tensor | None = None
        """The mean loss of this rank's rows times their weight, until the update."""
        self._own_rows: int | None = None
        """The number of the rows computed last that are this rank's own, and not borrowed; None: all of them."""

    def prepare(self, model: nn.Module) -> None:
        """Change layers of the fresh model, or refuse them, before its optimizers are made."""

    @collective
    def reduce_gradients(self, loss: Tensor) -> Tensor:
        """Make every ``p.grad`` the gradient of the whole batch; given this rank's weighted loss, return that of the
        whole batch. Called by all ranks."""
        return loss

    @property
    def done(self) -> int:
        return self._replica.step

    def backward(self, batch: Batch) -> Tensor | None:
        self._replica.reseed(batch.step)
        self._own_rows, own = len(batch), batch if len(batch) else batch.borrowed()
        loss, weight = self._share.weighted_loss(own, own=len(batch) > 0, total=self._share.total(own))
        self._replica.backward(loss, weight)
        self._loss = loss.detach() * (weight * self._share.reported_factor())
        return loss.detach() if len(batch) and weight else None

    def update(self) -> Mapping[str, Tensor]:
        loss, replica = self._loss, self._replica
        assert loss is not None, "update() follows backward()"
        loss = self.reduce_gradients(loss)
        for name in self.optimizers:
            if self.repeats and name in replica.optimizers.searching:
                torchs = type(self.optimizers[name]).__module__.startswith("torch.optim.")
                given = Closure(loss, replica.trainable(name), self._backward_again, torchs=torchs)
                replica.search(name, given)
            else:
                replica.apply(name)
        replica.commit()
        self._batch = self._loss = None
        return {"loss": loss}

    def _backward_again(self) -> Tensor:
        assert self._batch is not None, "update() follows backward()"
        loss = self.backward(self._batch)
        assert loss is not None, "backward() gives the whole batch's loss where it may be repeated"
        return loss

    def predict(self, batch: Batch) -> Any | None:
        return self._replica.predict(batch) if len(batch) else None

    def looked(self) -> None:
        self._replica.put_back()

    @property
    def schedules(self) -> ReplicaOptimizers:
        return self._replica.optimizers

    def _make_data_shard(self, world: World) -> DataShard:
        """This rank's share of every batch."""
        if self._workload.parts is None or not self.deals_parts:
            return DataShard(self._group.rank, self._group.size)
        return share_of(self._workload.parts, world, in_order=self._workload.count is None)

    # State

    @property
    def python(self) -> PythonState:
        return self._replica.python

    @property
    def replica(self) -> Replica:
        """The replica that this rank trains."""
        return self._replica

    def state_dict(self) -> State:
        return self._replica.state(self._group, self._own_rows)

    def load_state_dict(self, state: State) -> None:
        rows = DataShard(self._group.rank, self._group.size).rows(self._workload.update_size)
        self._replica.load(state, rows)
        self._own_rows = None

    def committed(self) -> State | None:
        alone = self._group.size == 1 or self._workload.carry is None  # rows of a carried state are a rank's own
        return self._replica.committed() if alone else None

    def replicated(self) -> Iterable[Replicated]:
        if self._group.size > 1:
            yield Replicated(self._group, self._replica.tensors())

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self._group.waited, "updating": self._replica.seconds}

    def _join_world(self, world: World) -> None:
        """Take this process's place among the ranks of another world."""
        self.rank, self._group = world.rank, world.group()
        self._replica.python.shares = self._group.size
        self._share = LossShare(self._replica, self._group)
        self.data_shard = self._make_data_shard(world)
        self._replica.set_rank(world.rank)
        self.source.set_rank(world.rank)


# The step of one device: the specification that exact strategies are held to.


class OneDeviceStep(ReplicaStep):
    """The whole batch, forward, backward and update, in this process."""

    repeats = True

    def __init__(self, workload: Workload, device: torch.device, rank: int = 0, *, alone: bool = False) -> None:
        """Build the step. ``alone``: this is the only rank, so that no other has to know of a weight that thaws."""
        super().__init__(workload, World(rank=rank, device=device))
        if alone:
            self._replica.trained.may_thaw()
        if workload.accumulate > 1:
            self._replica.begin_batch(first=True)

    def prepare(self, model: nn.Module) -> None:
        refuse_accumulation(model, self._workload, self.source)

    def backward(self, batch: Batch) -> Tensor:
        self._replica.reseed(batch.step)
        if self._workload.accumulate > 1:
            self._replica.begin_batch()
        loss = accumulated(self._replica, batch, self._one_batch)
        assert loss is not None, "one device has every loss"
        self._loss, self._batch = loss, batch
        return self._loss

    def _one_batch(self, batch: Batch) -> Tensor:
        replica = self._replica
        with replica.autocast():
            loss = replica.loss(replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        return loss.detach()

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
