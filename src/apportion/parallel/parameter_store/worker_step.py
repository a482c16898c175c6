"""The steps of a worker of Downpour SGD whose store lies in memory of its host.

``StoreMembership`` is the worker's place in the store of a world: it fills the store in, ends what dead processes have
begun, and connects to the servers. ``StoreStep`` has what both modes share. ``DownpourStep`` takes batches from the
queue as fast as this worker computes; ``OrderedStep`` computes in rounds, in which all workers push in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.python_state.python_state import PythonState
from apportion.core.strategy import Held, Recoverable, State
from apportion.core.workload import Workload
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions
from apportion.parallel.parameter_store.protocol import Sessions
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.push_pull_step import OrderedRounds, PushPullStep
from apportion.parallel.parameter_store.store import Snapshot, Store
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker, extent_of


@final
class StoreMembership:
    """The store of a world, and this worker's place in it. ``servers``: that many of the last slots hold the shards.
    ``lockstep``: all workers make the same steps together."""

    def __init__(self, worker: StoreWorker, world: World, *, lock_free: bool, servers: int, lockstep: bool) -> None:
        self._worker, self._lockstep = worker, lockstep
        extent = extent_of(worker, world, lock_free=lock_free, servers=servers)
        memory = world.shared(world.another("store"), StoreRegions(extent).nbytes)
        self.store = Store(extent, memory, worker=world.slot, check=self.check)
        self._servers = range(world.slots - servers, world.slots)
        self.workers: list[int] = []
        """The slots of the workers, in the order of their ranks."""
        self._survivor = self._was_in = False
        self._join_world(world)

    def check(self) -> None:
        """Raise where the world has changed."""
        self.world.check()

    def _join_world(self, world: World) -> None:
        self.world = world
        self.store.queue.waiting = lambda: world.group().waiting if world.members is not None else None
        self.entered = False
        """Tells whether the worker is in the store of this world."""
        self.disconnect()

    def rejoin(self, world: World) -> None:
        """Take a place in another world. Nothing is waited for here: what the dead have begun is ended by who comes
        next, on its way in."""
        self._join_world(world)
        self._survivor = self._was_in

    def enter(self, forget: Callable[[], None], meet: Callable[[], None]) -> None:
        """Prepare the store before anything is asked of it: it is filled in, and no dead process has left anything half
        done. ``forget()`` is called where what this worker had begun is over; ``meet()`` before the first batch."""
        store, world = self.store, self.world
        store.settle(lambda: store.put(self._worker.initial(), done=0), first=world.rank == 0)
        taken = world.members.slots_by_rank() if world.members is not None else list(range(world.size))
        self.workers = [slot for slot in taken if slot not in self._servers]
        if world.under_way:
            self._finish_pushes_of_dead(set(range(world.slots)) - set(taken) if world.rank == 0 else set(), forget)
        # Not before: what lies there may have been needed to end what the last process on this slot had begun.
        self._worker.move(store.weights)
        self._connect(all(slot in taken for slot in self._servers))
        meet()
        self.entered = self._was_in = True

    def _connect(self, complete: bool) -> None:
        """Connect to the servers; where one is lost for good, workers do its work, in the same memory."""
        store = self.store
        store.servers = None
        if complete and len(self._servers):
            store.servers = Sessions(store, self.world, self._servers)

    def disconnect(self) -> None:
        """Close the connections to the servers."""
        if self.store.servers is not None:
            self.store.servers.close()
            self.store.servers = None

    def _finish_pushes_of_dead(self, empty: set[int], forget: Callable[[], None]) -> None:
        """End, after a death, what was begun on the slots that no process has, and on one's own."""
        store = self.store
        # A process that lives still has the batches that it took, and pushes them later: only its push is ended. Those
        # of a process that died are handed out again.
        if self._survivor and not self._lockstep:
            if store.finish_push(self.world.slot):
                forget()
        else:
            store.finish(self.world.slot)
            forget()
        for slot in sorted(empty):
            store.finish(slot)


SNAPSHOT_SECONDS, COMMITTED_SECONDS = 120.0, 1.0
"""The seconds for which a checkpoint, and one of a run that ends, waits for a moment between two pushes."""


class StoreStep(PushPullStep, Recoverable):
    """The step of a worker whose store lies in memory of its host."""

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, *, servers: int = 0) -> None:
        worker = StoreWorker(workload, world.device)
        self._set_model(worker, world)
        self.source.act_as(world.slot)
        self._member = StoreMembership(
            worker, world, lock_free=schedule.mode == "hogwild", servers=servers, lockstep=self.lockstep
        )
        self.store: Store = self._member.store
        self._set_cycle(schedule)

    @property
    def python(self) -> PythonState:
        return self._worker.replica.python

    def rejoin(self, world: World) -> None:
        self.rank = world.rank
        self._member.rejoin(world)

    def _enter(self) -> None:
        if not self._member.entered:
            self._member.enter(self._forget, self._prepare_rounds)

    def _prepare_rounds(self) -> None:
        """Prepare for the first batch in a world."""

    # The whole

    def _state_of(self, found: Snapshot) -> State:
        with self._lock:
            state = self._worker.state(found.done, found.contents)
        state.settings["unpushed"] = found.unpushed
        return state

    def load_state_dict(self, state: State) -> None:
        self._enter()
        start = self._worker.load(state)
        if self.rank == 0:
            unpushed = () if self.lockstep else state.settings.get("unpushed", ())
            self.store.put(start, done=state.step, unpushed=unpushed)
        self._member.world.group().barrier()
        self._forget()

    def log(self) -> tuple[PushLog]:
        """Return the log of all pushes, while no worker pushes."""
        return (PushLog.from_store(self.store),)

    def held(self) -> Held:
        return Held(self.store.nbytes, self.store.weights.nbytes + self.store.buffers.nbytes)

    def leave(self) -> None:
        self.store.queue.stop_taking()

    def close(self) -> None:
        self._member.disconnect()


@final
class DownpourStep(StoreStep):
    """The step of a worker that takes batches as it comes to them."""

    lockstep = False

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, *, servers: int = 0) -> None:
        super().__init__(workload, world, schedule, servers=servers)
        self._max_staleness = schedule.max_staleness
        self._computed = False
        """Tells whether the gradient of the taken batch is among what has accrued."""

    def _forget(self) -> None:
        super()._forget()
        self._computed = False

    @property
    def done(self) -> int:
        return self.store.done

    def _next(self) -> Batch | None:
        queue, most = self.store.queue, self._max_staleness
        if most is not None:
            queue.wait_until(
                lambda: queue.pushes_ahead(self._member.workers) <= most,
                lambda: "the slowest to come within max_staleness",
            )
        ticket = queue.take_batch(self.source.total)
        if ticket is not None:
            return self.source.at(ticket, WHOLE)
        self._cycle.push_rest()
        queue.wake_all()
        return None

    def backward(self, batch: Batch) -> Tensor | None:
        if not self._computed:  # a push that a lost server has cut off is made again, of the same gradient
            self._cycle.compute(batch)
            self._computed = True
        return self._cycle.loss

    def update(self) -> Mapping[str, Tensor]:
        batch, cycle = self._taken, self._cycle
        assert batch is not None, "update() follows backward()"
        if cycle.is_due:
            cycle.push(batch.step)
        assert cycle.loss is not None
        self._taken, self._computed = None, False
        return {"loss": cycle.loss, "staleness": cycle.staleness}

    def state_dict(self) -> State:
        self._enter()
        return self._state_of(self.store.snapshot(self._member.check, SNAPSHOT_SECONDS))

    def committed(self) -> State | None:
        if not self._member.entered:
            return None
        store = self.store
        try:
            found = store.snapshot(lambda: None, COMMITTED_SECONDS)  # in the middle of an update: its end is near
        except PeerLost:
            # A worker that was in the middle of a push is dead: its batch is handed out again, though some shards have
            # it.
            with store.queue.locked():
                done, unpushed = store.queue.progress()
            found = Snapshot(done, unpushed, store.read())
        return self._state_of(found)


@final
class OrderedStep(OrderedRounds, StoreStep):
    """The step of a worker in ordered mode: every rank takes part in every batch, and only its owner has rows of it."""

    def _prepare_rounds(self) -> None:
        group = self._member.world.group()
        self.store.queue.begin_rounds()
        group.barrier()
        # Between two barriers, since no rank may push before all have read the same number.
        self._base = self._number = self.store.done
        group.barrier()

    @property
    def done(self) -> int:
        # This rank's own count: another may have made the next update by now.
        return self._number if self._member.entered else self.store.done

    @property
    def _workers(self) -> Sequence[int]:
        return range(self._member.world.size)

    def _meet_round(self, number: int) -> None:
        self.store.queue.enter_round(number)

    def _update_in_turn(self, number: int, own: bool) -> Mapping[str, Tensor]:
        store, workers = self.store, self._member.workers
        report = store.memory.reports[workers[self._owner(number)]]
        if own:
            assert self._own is not None
            store.queue.wait_until(lambda: store.queue.all_entered(workers), lambda: "every rank to pull")
            # Written before the push: the others read them as soon as the store counts it.
            report.loss, report.staleness = float(self._own), float(self._owner(number))
            self._cycle.push(number)
            self._own = None
        else:
            store.queue.wait_until(
                lambda: store.done > number, lambda: f"rank {self._owner(number)} to push batch {number}"
            )
        self._number = number + 1
        return {"loss": torch.tensor(report.loss), "staleness": torch.tensor(report.staleness, dtype=torch.float64)}

    def state_dict(self) -> State:
        self._enter()
        with self._lock:
            state = self._worker.state(self.done, self.store.read())
        self._member.world.group().barrier()  # no rank goes on while another still reads
        return state

    def committed(self) -> State | None:
        if not self._member.entered:
            return None
        try:
            found = self.store.snapshot(lambda: None, COMMITTED_SECONDS)  # in the middle of an update: its end is near
        except PeerLost:
            return None
        return self._state_of(replace(found, unpushed=[]))

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._base = self._number = state.step
