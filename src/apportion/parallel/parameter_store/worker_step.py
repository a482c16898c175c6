"""A worker of Downpour SGD: pulls weights, computes the gradient of a batch that it was given, and pushes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.python_state.python_state import PythonState
from apportion.core.strategy import Held, Recoverable, State
from apportion.core.workload import Workload
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.push_pull_step import PushPullStep
from apportion.parallel.parameter_store.store import Snapshot, Store
from apportion.parallel.parameter_store.store_membership import StoreMembership
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker

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
            self._member.enter(self._forget, self._meet)

    def _meet(self) -> None:
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
        return (PushLog.of(self.store),)

    def held(self) -> Held:
        return Held(self.store.nbytes, self.store.weights.nbytes + self.store.buffers.nbytes)

    def leave(self) -> None:
        self.store.deal.leave()

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
        deal, most = self.store.deal, self._max_staleness
        if most is not None:
            deal.wait(
                lambda: deal.ahead(self._member.workers) <= most, lambda: "the slowest to come within max_staleness"
            )
        ticket = deal.take(self.source.total)
        if ticket is not None:
            return self.source.at(ticket, WHOLE)
        self._cycle.push_rest()
        deal.tell()
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
            with store.deal.held():
                done, unpushed = store.deal.standing()
            found = Snapshot(done, unpushed, store.read())
        return self._state_of(found)
