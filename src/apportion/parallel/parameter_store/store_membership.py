"""A worker's place among those that share a store: how it comes in, and what it ends for those that died."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from apportion.comm.world import World
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions
from apportion.parallel.parameter_store.protocol import Sessions
from apportion.parallel.parameter_store.store import Store
from apportion.parallel.parameter_store.worker_model import StoreWorker, extent_of


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
        self._sit(world)

    def check(self) -> None:
        """Raise where the world has changed."""
        self.world.check()

    def _sit(self, world: World) -> None:
        self.world = world
        self.store.deal.waiting = lambda: world.group().waiting if world.members is not None else None
        self.entered = False
        """Tells whether the worker is in the store of this world."""
        self.disconnect()

    def rejoin(self, world: World) -> None:
        """Take a place in another world. Nothing is waited for here: what the dead have begun is ended by who comes
        next, on its way in."""
        self._sit(world)
        self._survivor = self._was_in

    def enter(self, forget: Callable[[], None], meet: Callable[[], None]) -> None:
        """Prepare the store before anything is asked of it: it is filled in, and no dead process has left anything half
        done. ``forget()`` is called where what this worker had begun is over; ``meet()`` before the first batch."""
        store, world = self.store, self.world
        store.settle(lambda: store.put(self._worker.initial(), done=0), first=world.rank == 0)
        taken = world.members.slots_by_rank() if world.members is not None else list(range(world.size))
        self.workers = [slot for slot in taken if slot not in self._servers]
        if world.under_way:
            self._see_to(set(range(world.slots)) - set(taken) if world.rank == 0 else set(), forget)
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

    def _see_to(self, empty: set[int], forget: Callable[[], None]) -> None:
        """End, after a death, what was begun on the slots that no process has, and on one's own."""
        store = self.store
        if self._survivor and not self._lockstep:
            if store.finish_push(self.world.slot):
                forget()
        else:
            store.finish(self.world.slot)
            forget()
        for slot in sorted(empty):
            store.finish(slot)
