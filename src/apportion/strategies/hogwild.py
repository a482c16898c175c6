"""hogwild: workers update the same weights in the same memory, without locks, and without asking.

Paper: Niu, Recht, Re and Wright, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS
2011.

::

    batches    handed out one by one, to the worker that is ready
    worker 0   forward, backward --\\
                                    >--  w[rows] -= lr * g[rows]     one vector of weights and slots, in shared memory
    worker 1   forward, backward --/

Every parameter of every worker's model lies in shared memory, and so does what its optimizer keeps: an update is the
optimizer's own, in place. A sparse gradient (``nn.EmbeddingBag(..., sparse=True)``) touches its rows and nothing else.
Two workers that write one number at the same time may lose one of the two updates, and a gradient may be of weights
that change while it is computed: the paper's bound needs updates that are sparse, and so seldom meet.

Price: ``t = max(t_compute(B) / n, t_update)`` a batch, ``t_update = bytes(rows touched) / bandwidth(memory)``.

Wins with large embeddings and linear models on sparse features: no lock, no copy, no pull. Loses with dense gradients,
whose cache lines travel between the cores at every update, and wherever a run must be done again: nothing says which
numbers a gradient has seen. ``parameter_server(mode="ordered")`` is what can be checked.

A worker's death loses its gradient, or leaves some numbers of it in the weights and others not; its batch is dealt
again, and the others do not stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.python_state.python_state import PythonState
from apportion.core.strategy import Held, Recoverable, State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import call_seconds, computed, memory_rate, updating
from apportion.cost_model.constraints import must_have_store
from apportion.cost_model.cost import Cost, MemoryUse, activations, copies
from apportion.cost_model.profile import Profile
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions
from apportion.parallel.parameter_store.store import Store
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker, extent_of, must_be_one_host
from apportion.parallel.replica.step import reference

STEP_CALLS, LAYER_CALLS = 80.0, 3.0
"""The time of Python, in ``Device.call_seconds``: of a step, in which a batch is dealt and counted under a lock, and
for each layer. Chosen so that the measured step of a small network comes out, where a call took 8 us."""


@final
@dataclass(frozen=True, repr=False)
class Hogwild(Strategy):
    """Workers that write to shared weights without locks."""

    exact = False
    survives = True

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        must_have_store(profile, layout)
        n, state = layout.ranks, profile.parameter_bytes * (1 + profile.slots)
        found = computed(profile, layout, [profile.batch_size] * n, between=math.inf)  # no worker waits
        # What the others have written since is no longer in this core's cache.
        foreign = state * (n - 1) / n / memory_rate(layout)
        python = (STEP_CALLS + LAYER_CALLS * len(profile.layers)) * call_seconds(layout)
        return Cost(
            terms={
                "computing": found.both,
                "updating": updating(profile, layout) + python,
                "communicating": foreign,
                "loading": found.loading,
            },
            memory=MemoryUse(
                own={
                    **copies(profile, weights=1, gradients=1, buffers=2),
                    "activations": activations(profile, profile.batch_size),
                },
                shared=copies(profile, weights=1, slots=1, buffers=1),
            ).a_worker(n),
            examples=profile.batch_size * n,
        )

    def build(self, workload: Workload, world: World) -> Step:
        must_be_one_host(self, world)
        return HogwildStep(workload, world)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        if world_size > 1:
            raise ValueError(
                f"hogwild on {world_size} workers computes something else in each run, and nothing can say what: check "
                'it with workers=1, or check parameter_server(mode="ordered")'
            )
        return reference(workload)


@final
class HogwildStep(Step, Recoverable):
    """One worker: torch's own optimizer, on memory that others write to as well."""

    lockstep = False

    def __init__(self, workload: Workload, world: World) -> None:
        # One shard: a piece of it is a parameter, and its count is the step that torch keeps.
        self._worker = worker = StoreWorker(workload, world.device, shards=1)
        self.device, self._clip = world.device, workload.clip_grad_norm
        self._replica = worker.replica
        self.model, self.optimizers = worker.replica.model, worker.replica.optimizers
        self.source, self.data_shard = worker.source, WHOLE
        extent = extent_of(worker, world, lock_free=True)
        memory = world.shared(world.another("store"), StoreRegions(extent).nbytes)
        self._store = Store(extent, memory, worker=world.slot, check=self._check)
        self._slots = [worker.layout.views(flat) for flat in self._store.memory.shards.slots[0].unbind(0)]
        self._before = torch.zeros(worker.buffer_numbers, dtype=torch.float64)
        self._world, self.rank = world, world.rank
        self._entered = self._was_in = False
        self._taken: Batch | None = None
        self._loss: Tensor | None = None
        self._seconds = 0.0

    def _check(self) -> None:
        self._world.check()

    def rejoin(self, world: World) -> None:
        self._world, self.rank, self._entered = world, world.rank, False

    def _enter(self) -> None:
        """Fills the store in before anything is asked of it, and deals again what lost workers had taken."""
        if self._entered:
            return
        store, world = self._store, self._world
        store.settle(lambda: store.put(self._worker.initial(), done=0), first=world.rank == 0)
        if not self._was_in:
            self._share()
        if world.under_way:
            taken = world.members.slots_by_rank() if world.members is not None else []
            empty = [worker for worker in range(world.slots) if worker not in taken] if world.rank == 0 else []
            for worker in [*empty, *([] if self._was_in else [world.slot])]:
                store.finish(worker)
        self._entered = self._was_in = True

    def _share(self) -> None:
        """Moves the parameters and the optimizer's slots into shared memory."""
        worker, memory = self._worker, self._store.memory
        layout = worker.layout
        worker.model.move(memory.shards.weights)
        counts = torch.from_numpy(memory.shards.counts[0][0])
        for number, p in enumerate(layout.parameters):
            slots = dict(zip(layout.rule.slots, (views[number] for views in self._slots), strict=True))
            kept = layout.rule.slots_of(worker.optimizer.param_groups[layout.groups[number]])
            state: dict[str, Any] = {name: slots[name] for name in kept}
            if layout.rule.keeps_step:
                state["step"] = counts[number]
            worker.optimizer.state[p] = state

    @property
    def done(self) -> int:
        return self._store.done

    @property
    def python(self) -> PythonState:
        return self._replica.python

    def take(self) -> Batch | None:
        self._enter()
        if self._taken is None:
            ticket = self._store.queue.take_batch(self.source.total)
            self._taken = None if ticket is None else self.source.at(ticket, WHOLE)
        return self._taken

    def backward(self, batch: Batch) -> Tensor | None:
        replica, buffers = self._replica, self._store.memory.shards.buffers[0]
        if len(buffers):
            self._worker.set_buffers(buffers)
            self._worker.model.read_buffers(self._before)
        replica.reseed(batch.step)
        with replica.autocast():
            loss = replica.loss(replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        if len(buffers):
            buffers.add_(self._worker.model.read_buffers(torch.empty_like(self._before)).sub_(self._before))
        self._loss = loss.detach()
        return self._loss

    def update(self) -> Mapping[str, Tensor]:
        began = time.perf_counter()
        batch, replica, layout = self._taken, self._replica, self._worker.layout
        assert batch is not None, "update() follows backward()"
        assert self._loss is not None, "update() follows backward()"
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(replica.trainable(), self._clip)
        replica.catch_up(batch.step)
        first = [n for n, p in enumerate(layout.parameters) if p.grad is not None and not self._touched[n]]
        self._begin(first)
        self._worker.optimizer.step()
        self._end(first)
        for p in self.model.parameters():
            p.grad = None
        replica.python.commit()
        self._store.queue.count_pushed()
        self._taken = None
        self._seconds += time.perf_counter() - began
        return {"loss": self._loss}

    @property
    def _touched(self) -> Any:
        return self._store.memory.shards.touched

    def _begin(self, first: list[int]) -> None:
        """Prepares torch's first step with momentum, which is another one: it looks whether there is a buffer yet."""
        for number in first:
            slots = self._worker.optimizer.state[self._worker.layout.parameters[number]]
            if "momentum_buffer" in slots and not self._worker.layout.rule.keeps_step:
                slots["momentum_buffer"] = None

    def _end(self, first: list[int]) -> None:
        for number in first:
            slots = self._worker.optimizer.state[self._worker.layout.parameters[number]]
            if "momentum_buffer" in slots and not self._worker.layout.rule.keeps_step:
                shared = self._slots[0][number]
                shared.copy_(slots["momentum_buffer"])
                slots["momentum_buffer"] = shared
            self._touched[number] = 1

    def predict(self, batch: Batch) -> Any | None:
        self._enter()
        if batch.start and len(self._before):
            self._worker.set_buffers(self._store.memory.shards.buffers[0])
        return self._replica.predict(batch) if len(batch) else None

    def state_dict(self) -> State:
        self._enter()
        with self._store.queue.locked():
            done, unpushed = self._store.queue.progress()
        state = self._worker.state(done, self._store.read())
        state.settings["unpushed"] = unpushed
        return state

    def committed(self) -> State | None:
        return self.state_dict() if self._entered else None

    def load_state_dict(self, state: State) -> None:
        self._enter()
        self._world.group().barrier()  # the parameters of all ranks are one memory, which loading writes
        start = self._worker.load(state)
        if self.rank == 0:
            self._store.put(start, done=state.step, unpushed=state.settings.get("unpushed", ()))
        self._world.group().barrier()
        self._taken = None

    def held(self) -> Held:
        return Held(self._store.nbytes, 0)

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self._store.waited, "updating": self._seconds}

    def leave(self) -> None:
        self._store.queue.stop_taking()
