"""The synchronous update of one host: weights once, each rank reduces and updates its own slice.

::

    every rank    forward, backward: its gradient, written once where all see it
                  arrive A, wait for all
                  its slice of the live version, and everyone's gradient of it -> the same slice of the other version
                  arrive B, wait for all
                  commit = c + 1: the other version is live

No rank writes the live version, and the commit word is the same from every rank: a worker that dies at any point
leaves a whole version behind, and the step that it was in is done again with the same draws (so with the same bits).
Sums are taken in rank order. Each rank does its part of the optimizer's work, so that is divided too.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.comm.group import Group
from apportion.comm.shared_memory_group import SharedMemoryGroup
from apportion.comm.sync import CACHE_LINE
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.fault_points import reached
from apportion.errors import StateLost
from apportion.parallel.ops.factored_linear import factored, plain_layers
from apportion.parallel.optim.elementwise import ElementwiseRule, rule_of, with_average
from apportion.parallel.replica.bucket_update import GradientUpdate
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.resync import share_python_state
from apportion.parallel.shared_weights.gradient_slots import GradientSlots
from apportion.parallel.shared_weights.layout import FactoredLayer, SharedLayout, regions_of
from apportion.parallel.shared_weights.slice_update import SliceUpdate
from apportion.parallel.shared_weights.weights_memory import RankLines, WeightsMemory


@final
class OptimizerView:
    """The state of a replica's optimizer, which is written into a version and shown as one is."""

    def __init__(self, replica: Replica, memory: WeightsMemory) -> None:
        self._replica, self._memory = replica, memory
        (self._optimizer,) = replica.optimizers.values()
        self._initial: dict[tuple[int, str], Tensor] = {
            (i, slot): self._optimizer.state[p][slot].clone()
            for i, p in enumerate(memory.parameters)
            for slot in memory.rule(i).slots
            if slot in self._optimizer.state.get(p, {})
        }
        """The slots that the optimizer has made before the first update."""

    def write(self, version: int) -> None:
        """Write the weights, slots and counts of this process into a version."""
        memory, weights = self._memory, self._memory.weights(version)
        for i, p in enumerate(memory.parameters):
            weights[i].copy_(p.detach())
            for slot in memory.rule(i).slots:
                value = self._optimizer.state.get(p, {}).get(slot, self._initial.get((i, slot)))
                view = memory.view(slot, version, i)
                view.zero_() if value is None else view.copy_(value)
            memory.counts[version][i] = self._updates_of(p)

    def _updates_of(self, p: nn.Parameter) -> int:
        state = self._optimizer.state.get(p, {})
        if "step" in state:
            return int(state["step"])
        return self._replica.step if state else 0

    def show(self) -> None:
        """Set the optimizer's state to that of the version that the weights are of (another rank may have committed the
        next one): what is read of it afterwards is a view."""
        memory, live = self._memory, self._replica.step % self._memory.layout.versions
        for i, p in enumerate(memory.parameters):
            count, rule = int(memory.counts[live][i]), memory.rule(i)
            if not count and not any((i, slot) in self._initial for slot in rule.slots):
                self._optimizer.state.pop(p, None)
                continue
            state: dict[str, Tensor] = {slot: memory.view(slot, live, i) for slot in rule.slots}
            if rule.counted:
                state["step"] = torch.tensor(float(count))
            if state:
                self._optimizer.state[p] = state


@final
class SharedUpdate(GradientUpdate):
    """The weights of a replica in shared pages, and their update."""

    def __init__(self, replica: Replica, world: World) -> None:
        self._replica, self._forward = replica, replica.forward
        layers = _linear_layers(replica)
        layout = _layout_of(replica, layers, world.slots)
        memory = world.shared(world.another("weights"), layout.nbytes)
        self._memory = WeightsMemory(layout, memory, replica.trainable())
        self._optimizer = OptimizerView(replica, self._memory)
        self._slots = GradientSlots(self._memory, replica, layers)
        self._lines = RankLines(self._memory)
        self._python_moved = ctypes.c_int64.from_buffer(world.shared(world.another("python"), CACHE_LINE))
        """1 once anything that the training keeps in Python has changed: the weights outlive every worker, that does
        not."""
        self._fresh = world.under_way
        """Tells whether this process has never had the weights."""
        replica.show = self._optimizer.show
        if not world.under_way:
            self.attach(world, world.group())

    def attach(self, world: World, group: Group) -> None:
        self._group = group
        meeting = group.meeting if isinstance(group, SharedMemoryGroup) else None
        self._arrive, self._wait = (meeting.arrive, meeting.wait) if meeting else (_nothing, _nothing)
        self._slots.attach(world.rank)
        self._lines.attach(world.rank, world.size)
        self.slice_update = SliceUpdate(self._replica, self._memory, self._slots, self._lines, group)
        known = group.all_gather(torch.tensor([0 if self._fresh else 1])).flatten()
        if not self._memory.ready.read():
            if not known.any():
                raise StateLost("no worker is left that had the weights")
            self._publish()
        fresh, self._fresh = self._fresh, False
        self.restore()
        if world.under_way:
            moved = bool(self._python_moved.value)
            share_python_state(self._replica, group, world.device, fresh=fresh, moved=moved)

    def _publish(self) -> None:
        """Make the weights as this process has them (every rank has the same) the live version. The commit word comes
        with them: were it written elsewhere, a death in between would leave it to the state before."""
        memory = self._memory
        if not self._fresh:
            memory.commit.publish(self._replica.step)
            live = self._replica.step % memory.layout.versions
            self._optimizer.write(live)
            self._forward.write(memory.moved[live], memory.reported[live])
        self._group.barrier()
        memory.ready.publish(1)

    def restore(self) -> None:
        """Make this process's weights and buffers the live version; what was begun after it is forgotten."""
        memory, commit = self._memory, self._memory.commit.read()
        live = commit % memory.layout.versions
        with self._replica.settled:
            if self._replica.step == commit:
                self._replica.python.roll_back()
            self._replica.catch_up(commit)
            memory.bind(live)
            self._forward.read(memory.moved[live], memory.reported[live])
        self.slice_update.uniform = memory.is_uniform(live)

    def begin_batch(self, batch: Batch) -> None:
        self._slots.begin_batch(batch)

    def __call__(self, loss: Tensor | None, weight: float) -> Tensor:
        replica, memory = self._replica, self._memory
        self._lines.report(0.0 if loss is None else float(loss) * weight, self._slots.used)
        reached("arriving")
        # Another thread of this process may be copying the state (Replica.committed), under this lock. Once all ranks
        # have arrived, they write over the version that was live before this one: a copy of that one has to be complete
        # by then.
        with replica.settled:
            self._arrive()
        reached("arrived")
        self._wait()
        began = time.perf_counter()
        total = self._lines.loss()
        commit = memory.commit.read()
        old, new = commit % memory.layout.versions, (commit + 1) % memory.layout.versions
        waited = self._group.waited
        used = self.slice_update(old, new)
        reached("slice")
        if self._group.rank == 0:
            memory.counts[new][:] = memory.counts[old] + (1 if used is None else used)
            if self._forward.places:
                self._forward.write(memory.moved[new], memory.reported[new])
        reached("written")
        # The commit word names the new version only after every rank has written its slice of it. All ranks write the
        # same value, so the word is right even if all but one die right after the barrier.
        self._group.barrier()
        reached("met")
        memory.commit.publish(commit + 1)
        reached("committed")
        self.seconds += time.perf_counter() - began - (self._group.waited - waited)
        with replica.settled:
            memory.bind(new)
            replica.advance()
            if replica.python.moved:
                self._python_moved.value = 1
        return torch.tensor(total, dtype=loss.dtype if loss is not None else torch.get_default_dtype())

    # State

    def loading(self) -> None:  # not into the live version
        for p in self._memory.parameters:
            p.data = p.data.clone()

    def loaded(self) -> None:
        self._group.barrier()
        self._memory.ready.withdraw()
        self._group.barrier()
        self._publish()
        self.restore()

    @property
    def shared_memory(self) -> memoryview:
        return self._memory.bytes[: self._memory.layout.versions_bytes]


def _linear_layers(replica: Replica) -> list[tuple[int, nn.Linear]]:
    """Return each plain Linear layer, with the number of its weight."""
    numbers: dict[Tensor, int] = {p: i for i, p in enumerate(replica.trainable())}
    return [(numbers[m.weight], m) for m in plain_layers(replica.model) if m.weight in numbers]


def _layout_of(replica: Replica, layers: list[tuple[int, nn.Linear]], workers: int) -> SharedLayout:
    """Return the layout of a replica's weights, and of what the ranks exchange to update them."""
    (optimizer,) = replica.optimizers.values()
    rules: list[tuple[Any, ElementwiseRule]] = []
    for group in optimizer.param_groups:
        rule = with_average(rule_of(optimizer, group), replica.workload.average)
        assert rule is not None
        rules.append((group, rule))
    rows, places, parameters = replica.workload.update_size, replica.forward.places, replica.trainable()
    return SharedLayout(
        regions=regions_of(rules, parameters),
        buffers=[(p.tensor.shape, p.tensor.dtype) for p in places if not p.parameter],
        frozen=[(p.tensor.shape, p.tensor.dtype) for p in places if p.parameter],
        layers=[
            FactoredLayer(i, m.in_features, m.out_features, m.weight.dtype)
            for i, m in layers
            if factored(m.weight, rows)
        ],
        rows=rows,
        parameters=len(parameters),
        workers=workers,
    )


def _nothing() -> None:
    pass
