"""A rank without batches: it holds shards of the store, and applies what workers push to them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.strategy import Held, Recoverable, State, Step
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions
from apportion.parallel.parameter_store.protocol import StoreServer
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.store import Store
from apportion.parallel.parameter_store.worker_model import StoreWorker, extent_of
from apportion.parallel.parameter_store.worker_step import SNAPSHOT_SECONDS


@final
class ServerStep(Step, Recoverable):
    """One server, on one of the last slots; it answers from the beginning to the end."""

    lockstep = False

    def __init__(self, workload: Workload, world: World, *, servers: int) -> None:
        self._worker = worker = StoreWorker(workload, world.device)
        self.device, self.rank, self._world = world.device, world.rank, world
        self.model, self.optimizers = worker.replica.model, worker.replica.optimizers
        self.source, self.data_shard = worker.source, None
        self._workers = range(world.slots - servers)
        extent = extent_of(worker, world, servers=servers)
        memory = world.shared(world.another("store"), StoreRegions(extent).nbytes)
        self._store = Store(extent, memory, worker=world.slot, check=self._check)
        number = world.slot - len(self._workers)
        self._server = StoreServer(
            extent, number, lambda slot: _of_worker(Store(extent, memory, worker=slot, server=number))
        )
        record = self._store.memory.servers[number]
        pid = record.word("pid")
        # Workers take the place for valid where the pid is that of this slot's process. So the old pid goes before the
        # place changes, and the new one comes after it.
        pid.withdraw()
        record.place = self._server.place
        pid.publish(os.getpid())
        self._store.queue.wake_all()

    def _check(self) -> None:
        self._world.check()

    def rejoin(self, world: World) -> None:
        self._world, self.rank = world, world.rank

    @property
    def done(self) -> int:
        return self._store.done

    def serve(self) -> None:
        taken = (
            self._world.members.slots_by_rank() if self._world.members is not None else list(range(self._world.size))
        )
        working = [slot for slot in taken if slot in self._workers]
        if not working:
            raise StateLost("every worker is lost, and parameter servers take no batches")
        self._settled()
        lines = self._store.memory.lines
        # Workers take as long as they like: what they wait for has deadlines of its own.
        while not all(lines[slot].ended for slot in working):
            self._store.queue.sleep_until_woken()
            if self._server.error is not None:
                raise self._server.error

    def _settled(self) -> None:
        self._store.settle(lambda: None, first=False)

    def backward(self, batch: Batch) -> Tensor | None:
        raise AssertionError("a rank without batches calls step.serve()")

    def update(self) -> Mapping[str, Tensor]:
        raise AssertionError("a rank without batches calls step.serve()")

    def predict(self, batch: Batch) -> Any | None:
        return None

    def state_dict(self) -> State:
        self._settled()
        found = self._store.snapshot(self._world.check, SNAPSHOT_SECONDS)
        state = self._worker.state(found.done, found.contents)
        state.settings["unpushed"] = found.unpushed
        return state

    def load_state_dict(self, state: State) -> None:
        self._worker.load(state)
        self._world.group().barrier()  # rank 0 fills the store in

    def log(self) -> tuple[PushLog]:
        """Return the log of all pushes, while no worker pushes."""
        return (PushLog.from_store(self._store),)

    def held(self) -> Held:
        return Held(self._store.nbytes, 0)

    def spent(self) -> Mapping[str, float]:
        return {"loading": 0.0, "waiting": self._store.waited, "updating": 0.0}

    def close(self) -> None:
        self._server.close()


def _of_worker(store: Store) -> Store:
    """Prepare a slot's store for the thread that calls. The worker of the slot is connected, so the store is filled in,
    or soon will be."""
    torch.set_num_threads(1)  # each thread has its own number: there is one for each worker already
    store.settle(lambda: None, first=False)
    return store
