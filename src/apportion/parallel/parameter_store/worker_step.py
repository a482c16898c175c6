"""A worker of Downpour SGD: pulls weights, computes the gradient of a batch that it was given, and pushes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch, Whole
from apportion.core.strategy import Held, Recoverable, State, Step
from apportion.core.workload import Workload
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions, StoreSpec
from apportion.parallel.parameter_store.protocol import Sessions
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.store import Snapshot, Store
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker

Mode = Literal["sharded", "hogwild", "ordered"]
SNAPSHOT_SECONDS, COMMITTED_SECONDS = 120.0, 1.0
"""The seconds for which a checkpoint, and one of a run that ends, waits for a moment between two pushes."""


@dataclass(frozen=True)
class PushPullSchedule:
    """The number of batches after which a worker pushes and pulls, and the number of pushes by which it may be ahead of
    the slowest."""

    mode: Mode = "sharded"
    push_every: int = 1
    pull_every: int = 1
    max_staleness: int | None = None


def extent_of(worker: StoreWorker, world: World, *, lock_free: bool = False, servers: int = 0) -> StoreSpec:
    """Return the specification of the store that this world shares."""
    return StoreSpec(
        layout=worker.layout,
        seats=world.seats,
        buffers=worker.buffer_numbers,
        lock_free=lock_free,
        batches=worker.source.total,
        servers=servers,
    )


@final
class DownpourStep(Step, Recoverable):
    """The training step of one worker, which pulls, computes and pushes batch by batch."""

    def __init__(self, workload: Workload, world: World, rhythm: PushPullSchedule, *, servers: int = 0) -> None:
        self._worker = worker = StoreWorker(workload, world.device)
        self.device, self._rhythm = world.device, rhythm
        self.model, self.optimizers = worker.replica.model, worker.replica.optimizers
        self.source = worker.source
        self.data_shard = WHOLE
        self.lockstep = rhythm.mode == "ordered"
        extent = extent_of(worker, world, lock_free=rhythm.mode == "hogwild", servers=servers)
        memory = world.shared(world.another("store"), StoreRegions(extent).nbytes)
        self.store = store = Store(extent, memory, seat=world.seat, check=self._check)
        self._near = world.local_size == world.size
        if not self._near:  # what is sent and received lies in this process's own memory
            store.weights = worker.weights
            store.gradient, store.change = torch.zeros_like(store.weights), torch.zeros_like(store.buffers)
        self._servers = range(world.seats - servers, world.seats)
        self._gradients = worker.layout.views(self.store.gradient)
        self._survivor = self._was_in = False
        self._base = self._number = 0
        """The update that the first round begins with, and the next one, in lockstep."""
        self._sit(world)
        self._begin()
        self._loss: Tensor | None = None
        self._staleness = torch.zeros((), dtype=torch.float64)
        self._seconds = 0.0
        self._lock = threading.Lock()

    def _check(self) -> None:
        self._world.check()

    def _sit(self, world: World) -> None:
        self._world, self.rank = world, world.rank
        self.store.deal.waiting = lambda: world.group().waiting if world.members is not None else None
        self._entered = False
        if self.store.servers is not None:
            self.store.servers.close()
            self.store.servers = None

    def _begin(self) -> None:
        """Reset the step: no batch is taken, and no gradient waits to be pushed."""
        self._taken: Batch | None = None
        """The batch that was handed out to this worker, and whose step is not done."""
        self._computed = False
        """Tells whether the gradient of the taken batch is among what has accrued."""
        self._accrued: list[bool] | None = None
        """Flags that say which parameters have a gradient that is not pushed yet; None: there is none at all."""
        self._since_push = self._since_pull = 0
        self._fresh = False
        """Tells whether the weights are as they were pulled."""
        self._own: Tensor | None = None
        """The loss, in ordered mode, of this rank's batch of the round, whose gradient waits for its turn."""

    def rejoin(self, world: World) -> None:
        # Nothing is waited for here: what the dead have begun is ended by who comes next, on its way in.
        self._sit(world)
        self._survivor = self._was_in

    def _enter(self) -> None:
        """Prepare the store before anything is asked of it: it is filled in, and no dead process has left anything half
        done."""
        if self._entered:
            return
        store, world = self.store, self._world
        store.settle(lambda: store.put(self._worker.initial(), done=0), first=world.rank == 0)
        seated = world.members.seated() if world.members is not None else list(range(world.size))
        self._seats = [seat for seat in seated if seat not in self._servers]
        if world.generation:
            self._see_to(set(range(world.seats)) - set(seated) if world.rank == 0 else set())
        # Not before: what lies there may have been needed to end what the last process on this seat had begun.
        self._worker.move(store.weights)
        self._talk(all(seat in seated for seat in self._servers))
        if self.lockstep:
            store.deal.begin_rounds()
            world.group().barrier()
            self._base = self._number = store.done
            world.group().barrier()
        self._entered = self._was_in = True

    def _talk(self, complete: bool) -> None:
        """Connect to the servers; where one is lost for good, workers do its work, in the same memory."""
        store = self.store
        store.servers = None
        if complete and len(self._servers):
            store.servers = Sessions(store, self._world, self._servers, near=self._near)

    def _see_to(self, empty: set[int]) -> None:
        """End, after a death, what was begun on the seats that no process has, and on one's own."""
        store = self.store
        if self._survivor and not self.lockstep:
            if store.finish_push(self._world.seat):
                self._begin()
        else:
            store.finish(self._world.seat)
            self._begin()
        for seat in sorted(empty):
            store.finish(seat)

    # Batches

    @property
    def done(self) -> int:
        # In lockstep this rank's own count: another may have made the next update by now.
        return self._number if self.lockstep and self._entered else self.store.done

    def take(self) -> Batch | None:
        self._enter()
        if self._taken is None:
            self._taken = self._turn() if self.lockstep else self._dealt()
        return self._taken

    def _turn(self) -> Batch | None:
        """Return the next batch in ordered mode: every rank takes part in every batch; only its owner has rows of
        it."""
        number = self.done
        if number >= self.source.total:
            return None
        batch = self.source.at(number, WHOLE)
        if self._owner(number) == self.rank:
            return batch
        whole = Whole(number, batch.epoch, batch.size, batch.start, int(batch.index[0]))
        return Batch(self.source, whole, index=batch.index[:0], rows=slice(batch.size, batch.size))

    def _owner(self, number: int) -> int:
        return (number - self._base) % self._world.size

    def _dealt(self) -> Batch | None:
        store, most = self.store, self._rhythm.max_staleness
        if most is not None:
            store.deal.wait(
                lambda: store.deal.ahead(self._seats) <= most, lambda: "the slowest to come within max_staleness"
            )
        ticket = store.deal.take(self.source.total)
        if ticket is not None:
            return self.source.at(ticket, WHOLE)
        if self._accrued is not None:
            self._push(self._last_batch)
        store.deal.tell()
        return None

    # A step

    def backward(self, batch: Batch) -> Tensor | None:
        if not self.lockstep:  # a push that a lost server has cut off is made again, of the same gradient
            return self._loss if self._computed else self._compute(batch)
        if self._own is None and self._owner(batch.step) == 0:
            own = batch.step + self.rank
            if own < self.source.total:  # all ranks compute now, on the weights that the round begins with
                self.store.deal.open(own)
                self._own = self._compute(self.source.at(own, WHOLE) if len(batch) == 0 else batch)
            self.store.deal.enter_round(batch.step)
        return self._own if len(batch) else None

    def _compute(self, batch: Batch) -> Tensor:
        store, worker = self.store, self._worker
        pulls = self._since_pull == 0 or self._fresh
        if self._since_pull == 0 and not self._fresh:
            self._pull()
        store.deal.note(store.pulled if pulls else None)
        self._fresh = False
        first = self._accrued is None
        alone = self._rhythm.pull_every > 1
        self._loss, used = worker.compute(batch, self._gradients, store.change, first=first, alone=alone)
        if self._accrued is None:
            self._accrued = used
        else:
            self._accrued = [a or b for a, b in zip(self._accrued, used, strict=True)]
        self._last_batch = batch.step
        self._since_push += 1
        self._since_pull = (self._since_pull + 1) % self._rhythm.pull_every
        self._computed = True
        return self._loss

    def _pull(self) -> None:
        began = time.perf_counter()
        self.store.pull()
        self._worker.set_buffers(self.store.buffers)
        self._fresh = True
        self._seconds += time.perf_counter() - began

    def update(self) -> Mapping[str, Tensor]:
        batch = self._taken
        assert batch is not None, "update() follows backward()"
        if self.lockstep:
            values = self._update_in_turn(batch.step, len(batch) > 0)
        else:
            if self._since_push >= self._rhythm.push_every:
                self._push(batch.step)
            assert self._loss is not None
            values = {"loss": self._loss, "staleness": self._staleness}
        self._taken, self._computed = None, False
        return values

    def _push(self, batch: int) -> None:
        began = time.perf_counter()
        used = None if self._accrued is None or all(self._accrued) else self._accrued
        pulls = self._since_pull == 0 and not self.lockstep
        stale = self.store.push(self._worker.hyper.at(batch), used=used, pull=pulls)
        self._staleness = torch.tensor(stale, dtype=torch.float64)
        self._accrued, self._since_push = None, 0
        if pulls:
            self._worker.set_buffers(self.store.buffers)
            self._fresh = True
        if self._rhythm.max_staleness is not None or self.lockstep:
            self.store.deal.tell()
        self._seconds += time.perf_counter() - began

    def _update_in_turn(self, number: int, own: bool) -> Mapping[str, Tensor]:
        store = self.store
        told = store.memory.told[self._seats[self._owner(number)]]
        if own:
            assert self._own is not None
            store.deal.wait(lambda: store.deal.all_entered(self._seats), lambda: "every rank to pull")
            told.loss, told.staleness = float(self._own), float(self._owner(number))
            self._push(number)
            self._own = None
        else:
            store.deal.wait(lambda: store.done > number, lambda: f"rank {self._owner(number)} to push batch {number}")
        self._number = number + 1
        return {"loss": torch.tensor(told.loss), "staleness": torch.tensor(told.staleness, dtype=torch.float64)}

    # The whole

    def predict(self, batch: Batch) -> Any | None:
        self._enter()
        if batch.start:  # one pass over the set is of one state of the weights
            self._pull()
            if self.lockstep:  # others may push before the round is over: the next one pulls for itself
                self._fresh = False
        return self._worker.replica.predict(batch) if len(batch) else None

    def state_dict(self) -> State:
        self._enter()
        if not self.lockstep:
            return self._state_of(self.store.snapshot(self._check, SNAPSHOT_SECONDS))
        with self._lock:
            state = self._worker.state(self.done, self.store.read())
        self._world.group().barrier()  # nobody goes on while another still reads
        return state

    def _state_of(self, found: Snapshot) -> State:
        with self._lock:
            state = self._worker.state(found.done, found.contents)
        state.settings["unpushed"] = found.unpushed
        return state

    def committed(self) -> State | None:
        if not self._entered:
            return None
        store = self.store
        try:
            found = store.snapshot(lambda: None, COMMITTED_SECONDS)  # in the middle of an update: its end is near
        except PeerLost:
            if self.lockstep:
                return None
            # Whoever was in the middle of a push is dead: its batch is dealt again, though some shards have it.
            with store.deal.held():
                done, unpushed = store.deal.standing()
            found = Snapshot(done, unpushed, store.read())
        return self._state_of(replace(found, unpushed=[]) if self.lockstep else found)

    def load_state_dict(self, state: State) -> None:
        self._enter()
        start = self._worker.load(state)
        if self.rank == 0:
            self.store.put(start, done=state.step)
            left = [ticket for ticket in state.settings.get("unpushed", ()) if not self.lockstep]
            self.store.resume(left)
        self._world.group().barrier()
        self._begin()
        self._base = self._number = state.step

    def log(self) -> tuple[PushLog]:
        """Return the log of all pushes, while no worker pushes."""
        return (PushLog.of(self.store),)

    def held(self) -> Held:
        return Held(self.store.nbytes, self.store.weights.nbytes + self.store.buffers.nbytes)

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self.store.waited, "updating": self._seconds}

    def leave(self) -> None:
        self.store.deal.leave()

    def close(self) -> None:
        if self.store.servers is not None:
            self.store.servers.close()
