"""The computation of one batch in a worker of the store: the network on flat weights, and its gradient.

The run and its replay share it. The step adds the store, the queue of batches, and the order in which workers are let
in.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.average import NO_AVERAGE
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.json_data import from_plain, to_plain
from apportion.core.python_state.leaves import refuse_other_extra_state
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.parameter_store.flat_model import FlatModel, HyperTable
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout
from apportion.parallel.parameter_store.memory.store_memory import Array
from apportion.parallel.parameter_store.memory.store_spec import StoreSpec
from apportion.parallel.parameter_store.store import Contents
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.replica.forward_state import ForwardTensor, moved_tensors
from apportion.parallel.replica.initial_model import refuse_renormalising, refuse_tied_by_memory
from apportion.parallel.replica.replica import Replica, called

WHOLE = DataShard(whole_batches=True)


def refuse(workload: Workload) -> None:
    """Refuse, with a ValueError that names it, what whole batches that are computed one by one on any worker cannot
    do."""
    for what, given, cure in (
        ("update=", workload.update is not None, "give a loss, or use data_parallel"),
        ("carry=", workload.carry is not None, "a state follows its rows from batch to batch: use data_parallel"),
        (
            f"accumulate={workload.accumulate}",
            workload.accumulate > 1,
            "use batch_size= times as many, or data_parallel, fully_sharded or single_device",
        ),
        (f"average={workload.average}", workload.average is not None, NO_AVERAGE),
        (
            f"schedule_on={workload.schedule_on!r}",
            workload.schedule_on is not None,
            "workers are at different updates when one evaluates: use data_parallel",
        ),
        ('precision="float16"', workload.precision == "float16", 'use "bfloat16", which needs no loss scale'),
    ):
        if given:
            raise ValueError(f"{what} does not go with asynchronous workers: {cure}")


def must_be_one_host(what: object, world: World) -> None:
    """Raise ValueError where the ranks that are to share a store run on several hosts. ``what``: what needs it."""
    if world.local_size < world.size:
        raise ValueError(
            f"{what} keeps its weights in memory that all of its workers share, and these {world.size} ranks run "
            "on several hosts: use data_parallel, or local_sgd, which sends less"
        )


class StoreWorker:
    """The network of one worker, its weights in one flat vector, and the computation of a batch."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        shards: int | None = None,
        split: SplitStep | None = None,
    ) -> None:
        """Prepare the network on flat weights. ``split``: the network in parts, of which this rank has one: all ranks
        of its group compute a batch together."""
        refuse(workload)
        if device.type != "cpu":
            raise ValueError(f'device="{device.type}": a parameter store is memory of the host; use device="cpu"')
        # Each batch has one worker, and which one is chance: what it draws must not depend on that.
        self._split = split
        self.replica = Replica(workload, rank=0, device=device) if split is None else split.replica
        replica = self.replica
        refuse_other_extra_state(replica.model, "a parameter store")
        refuse_tied_by_memory(replica.model, "a parameter store keeps every weight by itself")
        refuse_renormalising(replica.model, "the store would never hear of it")
        self.owner, self.optimizer = next(iter(replica.optimizers.items()))
        self.layout = StoreLayout(replica.names, self.optimizer, shards=shards)
        self.weights = torch.zeros(self.layout.total, dtype=self.layout.dtype)
        moved: list[ForwardTensor] = []
        if split is None:
            seed_everything(workload.seed)
            self.source = BatchSource(workload, device=device, dtype=replica.input_dtype)
            self.source.count_for(replica.model)
            first = self.source.at(0, WHOLE)
            with self.source.looking():
                _ = first.inputs  # they stay loaded
            moved = moved_tensors(
                replica.model, replica.trainable(), lambda: called(workload, replica.model, first, device)
            )
            self.source.acts(replica.model)
            replica.python.watch(data=self.source.dataset)
        replica.python.apart = "kept by each worker for itself, as each takes what batches it can"
        self.model = FlatModel(replica.model, self.layout, self.weights, moved)
        numbers = self.model.buffer_numbers
        self._before, self._after = torch.zeros(numbers, dtype=torch.float64), torch.zeros(numbers, dtype=torch.float64)
        if split is None:
            replica.start_schedules(self.source.total, self.source.deal.batches)
            other = workload.make_optimizer(list(replica.model.named_parameters()))
            leading = other if isinstance(other, torch.optim.Optimizer) else next(iter(other.values()))
        else:
            self.source, leading = split.source, _without_parameters(self.optimizer)
        schedule = workload.make_schedule(leading, self.source.total, self.source.deal.batches)
        self.hyper = HyperTable(self.layout.rule, leading, schedule)
        self._clip = workload.clip_grad_norm
        self._sign = [-1.0 if g.get("maximize") else 1.0 for g in self.optimizer.param_groups]

    @property
    def buffer_numbers(self) -> int:
        """The number of elements of the buffers."""
        return len(self._before)

    def move(self, weights: Tensor) -> None:
        """Move the network's weights into this memory; they keep their values."""
        if weights.data_ptr() != self.weights.data_ptr():
            weights.copy_(self.weights)
            self.weights = weights
            self.model.move(weights)

    def set_buffers(self, buffers: Tensor) -> None:
        """Set the buffers to those that were pulled."""
        if len(buffers):
            self.model.write_buffers(buffers)

    def compute(
        self, batch: Batch, into: Sequence[Tensor], change: Tensor, *, first: bool, alone: bool
    ) -> tuple[Tensor, list[bool]]:
        """Run forward and backward on the weights as they are. The gradient is written into the views ``into``, and the
        change of the buffers by the forward pass into ``change``; unless this is the ``first`` batch, both are added
        to what is there. ``alone``: the weights then take a step of their own, which lasts until the next pull.
        Returns the loss, and which parameters have a gradient."""
        replica = self.replica
        if len(change):
            self.model.read_buffers(self._before)
        if self._split is not None:
            self._split.backward(batch)
            loss = self._split.finish()
        else:
            replica.reseed(batch.step)
            with replica.autocast():
                loss = replica.loss(replica.outputs(batch), batch.targets)
            replica.backward(loss, 1.0)
            if self._clip is not None:
                torch.nn.utils.clip_grad_norm_(replica.trainable(), self._clip)
        if len(change):
            moved = self.model.read_buffers(self._after).sub_(self._before)
            change.copy_(moved) if first else change.add_(moved)
        if alone:
            self._step_alone(batch.step)
        replica.python.commit()
        return loss.detach(), self.model.gather(list(into), first=first)

    @torch.no_grad()
    def _step_alone(self, batch: int) -> None:
        """Update the worker's own weights by plain gradient descent (algorithm 7.1)."""
        hyper = self.hyper.at(batch)
        for p, group in zip(self.layout.parameters, self.layout.groups, strict=True):
            if p.grad is not None:
                p.add_(p.grad, alpha=-hyper[group][0] * self._sign[group])

    # States

    def initial(self) -> Contents:
        """Return the contents that a store has before the first update."""
        slots = [self.model.values()]
        for slot in self.layout.rule.slots:
            flat = torch.zeros_like(self.weights)
            for view, group in zip(self.layout.views(flat), self.layout.groups, strict=True):
                view.fill_(self.layout.rule.first(slot, self.optimizer.param_groups[group]))
            slots.append(flat)
        counts: list[Array] = [np.zeros(len(pieces)) for pieces in self.layout.pieces]
        touched = np.zeros(len(self.layout.parameters), dtype=bool)
        return Contents(slots, counts, touched, self.model.read_buffers(self._before.clone()))

    def state(self, done: int, found: Contents) -> State:
        """Return a store's contents as a state of the form that every strategy has."""
        layout, groups = self.layout, self.optimizer.param_groups
        steps = [0.0] * len(layout.parameters)
        for pieces, of in zip(layout.pieces, found.counts, strict=True):
            for piece, count in zip(pieces, of, strict=True):  # shards of one parameter may differ while some push
                steps[piece.parameter] = max(steps[piece.parameter], float(count))
        views = {slot: layout.views(flat) for slot, flat in zip(layout.rule.slots, found.data[1:], strict=True)}
        optimizer: dict[str, Tensor] = {}
        for number, name in enumerate(layout.names):
            if not found.touched[number] and not layout.rule.at_once:
                continue
            key = f"{self.owner}/{name}".lstrip("/")
            if layout.rule.keeps_step:
                optimizer[f"{key}/step"] = torch.tensor(steps[number], dtype=torch.float32)
            for slot in layout.rule.slots_of(groups[layout.groups[number]]):
                optimizer[f"{key}/{slot}"] = views[slot][number].clone()
        self.replica.catch_up(done)
        plain = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        schedules = {name: schedule.state_dict() for name, schedule in self.replica.optimizers.schedules.items()}
        model, buffers = self.model.state(found.data[0], found.buffers)
        python, tensors = self.replica.python.record()
        return State(
            step=done,
            model=model,
            buffers=buffers,
            optimizer=optimizer,
            python=tensors,
            settings={
                "python": python,
                "groups": to_plain({self.owner: plain}, "optimizer"),
                "schedules": to_plain(schedules, "schedule"),
            },
        )

    def load(self, state: State) -> Contents:
        """Go on from a state; returns the contents that the store begins with."""
        self.replica.forward.make_room(state.model)
        self.replica.model.load_state_dict(state.model)
        self.replica.forward.loaded(state.buffers)
        self.replica.load_python(state)
        groups = from_plain(state.settings["groups"])
        schedules = from_plain(state.settings["schedules"])

        def put(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
            for group, saved in zip(optimizer.param_groups, groups[self.owner], strict=True):
                group.update(saved)
            if schedule is not None:
                schedule.load_state_dict(schedules[self.owner])

        put(self.optimizer, self.replica.optimizers.schedules.get(self.owner))
        self.hyper.start_from(state.step, put)
        self.replica.step = state.step
        contents = self.initial()
        steps = [0.0] * len(self.layout.names)
        for slot, flat in zip(self.layout.rule.slots, contents.data[1:], strict=True):
            for number, (name, view) in enumerate(zip(self.layout.names, self.layout.views(flat), strict=True)):
                key = f"{self.owner}/{name}".lstrip("/")
                if f"{key}/{slot}" in state.optimizer:
                    view.copy_(state.optimizer[f"{key}/{slot}"])
                    steps[number] = float(state.optimizer.get(f"{key}/step", 1.0))
                    contents.touched[number] = True
        for pieces, of in zip(self.layout.pieces, contents.counts, strict=True):
            of[:] = [steps[piece.parameter] for piece in pieces]
        return contents


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with its groups as they were made, without parameters, for a schedule to change."""
    other = copy.copy(optimizer)
    other.param_groups = []
    for group in optimizer.param_groups:
        kept = {name: value for name, value in group.items() if name != "initial_lr"}
        other.param_groups.append({**kept, "lr": group.get("initial_lr", group["lr"]), "params": []})
    return other


def extent_of(worker: StoreWorker, world: World, *, lock_free: bool = False, servers: int = 0) -> StoreSpec:
    """Return the specification of the store that this world shares."""
    return StoreSpec(
        layout=worker.layout,
        workers=world.slots,
        buffers=worker.buffer_numbers,
        lock_free=lock_free,
        batches=worker.source.total,
        servers=servers,
    )
