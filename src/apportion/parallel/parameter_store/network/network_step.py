"""The steps of Downpour SGD whose ranks run on several hosts, and the choice of the ranks that are servers.

``NetworkPlaces`` says which ranks hold shards and which compute. ``NetworkDownpourStep`` is a worker that takes batches
from the queue, ``NetworkServerStep`` a rank that holds shards and takes no batches, and ``OrderedNetworkStep`` either
of them in ordered mode, where every rank takes part in every batch. ``build_servers`` and ``serve`` make and run the
servers of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from apportion.comm.group import collective
from apportion.comm.network.rendezvous import RankDoors
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.strategy import Held, State, Step
from apportion.core.workload import Workload
from apportion.parallel.parameter_store.memory.store_spec import StoreSpec
from apportion.parallel.parameter_store.network.messages import CONTROL
from apportion.parallel.parameter_store.network.network_store import NetworkStore
from apportion.parallel.parameter_store.network.range_session import IncarnationOver, RangeSession
from apportion.parallel.parameter_store.network.range_state import RangeState
from apportion.parallel.parameter_store.network.shard_servers import ShardServers, WorkerRegistry, copy_ranks
from apportion.parallel.parameter_store.network.views import Arbiter, ViewSource
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.push_pull_step import OrderedRounds, PushPullStep
from apportion.parallel.parameter_store.shard_range import Range
from apportion.parallel.parameter_store.store import Contents
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker


def server_ranks(hosts: Sequence[int], servers: int) -> list[int]:
    """Return the ranks of the servers, in the order of their ranges: the last rank of the last host, the last rank of
    the host before it, and so on round the hosts, each time the last that is none yet; rank 0 always works. ``hosts``:
    the host of every rank. ValueError where no worker would be left."""
    if servers >= len(hosts):
        raise ValueError(f"servers={servers} leaves no worker among {len(hosts)} processes: start more")
    free = {host: [rank for rank, of in enumerate(hosts) if of == host and rank != 0] for host in set(hosts)}
    found: list[int] = []
    while len(found) < servers:
        for host in sorted(free, reverse=True):
            if free[host] and len(found) < servers:
                found.append(free[host].pop())
    return sorted(found)


def must_have_servers(what: object, servers: int, world_size: int) -> None:
    """Raise ValueError where ranks of several hosts are to share a store and none of them is a server."""
    if not servers:
        raise ValueError(
            f"{what} keeps its weights in memory that all of its workers share, and these {world_size} ranks run on "
            "several hosts: give parameter_server(servers=1), and one of the ranks holds the shards for the others, "
            "or servers=2 for two"
        )


_Found = TypeVar("_Found")


@dataclass(frozen=True)
class NetworkPlaces:
    """Where the servers and workers of a store are. ``hosts``: the host of every rank."""

    hosts: tuple[int, ...]
    servers: tuple[int, ...]
    """The ranks of the servers, in the order of their ranges."""
    copies: tuple[int, ...]
    """The rank that has the copy of each range; none where there are none."""

    @classmethod
    def choose(cls, hosts: list[int], *, servers: int, copies: int) -> NetworkPlaces:
        """Choose the ranks that are servers, and those that keep copies."""
        ranks = server_ranks(hosts, servers)
        return cls(tuple(hosts), tuple(ranks), tuple(copy_ranks(ranks, hosts)) if copies else ())

    @property
    def workers(self) -> list[int]:
        """The ranks of the workers; their places in it are their numbers."""
        return [rank for rank in range(len(self.hosts)) if rank not in self.servers]


def spec_of(worker: StoreWorker, places: NetworkPlaces) -> StoreSpec:
    """Return the specification of the store that these ranks share."""
    return StoreSpec(
        layout=worker.layout,
        workers=len(places.workers),
        buffers=worker.buffer_numbers,
        batches=worker.source.total,
        servers=len(places.servers),
    )


@collective
def doors_of(world: World) -> RankDoors:
    """Return the way to the other ranks of a world. Called by all of them."""
    group: Any = world.group()
    doors: RankDoors = (getattr(group, "flat", None) or group).doors()
    return doors


def build_servers(
    doors: RankDoors, spec: StoreSpec, places: NetworkPlaces, contents: Callable[[], Contents]
) -> ShardServers:
    """Return the servers of this rank, which has not begun to answer yet."""

    def state(number: int) -> RangeState:
        return RangeState(spec, number, contents())

    def registry(servers: ShardServers) -> WorkerRegistry:
        def others() -> list[RangeSession]:
            numbers = range(1, len(places.servers))
            return [RangeSession(Range(spec, n), n, doors, servers.views, CONTROL) for n in numbers]

        return WorkerRegistry(lambda: servers.ranges.get(0), others, servers.closed)

    return ShardServers(doors, places.servers, places.copies, state, registry)


class NetworkWorkerStep(PushPullStep):
    """What steps of workers have in common whose servers are on other hosts."""

    ends_together = False

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, places: NetworkPlaces) -> None:
        worker, self._world = StoreWorker(workload, world.device), world
        self._set_model(worker, world)
        spec, doors = spec_of(worker, places), doors_of(world)
        arbiter = Arbiter(doors, places.servers) if world.rank == 0 else None
        self.places = places
        number = places.workers.index(world.rank) if world.rank in places.workers else CONTROL
        self.store: NetworkStore = NetworkStore(spec, worker.weights, doors, ViewSource(doors, arbiter), number)
        self._doors = doors
        self._set_cycle(schedule)
        self._entered = False

    def _enter(self) -> None:
        if not self._entered:
            self.store.join()
            self._forget()
            self._entered = True

    def state_dict(self) -> State:
        self._enter()
        found = self.store.snapshot()
        with self._lock:
            state = self._worker.state(found.done, found.contents)
        state.settings["unpushed"] = found.queue.unpushed()
        return state

    def load_state_dict(self, state: State) -> None:
        self._enter()
        start = self._worker.load(state)
        group = self._world.group()
        group.barrier()  # every rank has entered, and none pushes
        if self.rank == 0:
            unpushed = () if self.lockstep else state.settings.get("unpushed", ())
            self.store.put(start, done=state.step, unpushed=unpushed)
        group.barrier()
        self.store.restart()
        self._forget()

    def log(self) -> tuple[PushLog]:
        """Return the log of all pushes."""
        return (self.store.log(),)

    def held(self) -> Held:
        return Held(0, self.store.nbytes)

    def close(self) -> None:
        self.store.close()
        self._doors.close()


@final
class NetworkDownpourStep(NetworkWorkerStep):
    """The step of a worker that takes batches as it comes to them, from a queue on another host."""

    lockstep = False

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, places: NetworkPlaces) -> None:
        super().__init__(workload, world, schedule, places)
        self._max_staleness = schedule.max_staleness

    @property
    def done(self) -> int:
        return self.store.done

    def take(self) -> Batch | None:
        while True:
            self._enter()
            try:
                if self._taken is None:
                    self._taken = self._next()
                return self._taken
            except IncarnationOver:
                self._entered = False

    def _next(self) -> Batch | None:
        batch = self._ask_for_batch(waits=False)
        if batch is None:
            self._cycle.push_rest()
            batch = self._ask_for_batch(waits=True)  # another worker's may come back until it has pushed
        return None if batch is None else self.source.at(batch, WHOLE)

    def _ask_for_batch(self, *, waits: bool) -> int | None:
        """Ask for a batch. The time counts as waiting for others, since a worker that is too far ahead waits here."""
        clock = self._world.group().all_waits
        clock.begin()
        try:
            return self.store.take_batch(self.source.total, waits=waits, most=self._max_staleness)
        finally:
            clock.end()

    def backward(self, batch: Batch) -> Tensor | None:
        self._cycle.compute(batch)
        return self._cycle.loss

    def update(self) -> Mapping[str, Tensor]:
        batch, cycle = self._taken, self._cycle
        assert batch is not None, "update() follows backward()"
        try:
            if cycle.is_due:
                cycle.push(batch.step)
        except IncarnationOver:  # the batch was handed out again while this worker was cut off: it begins anew
            loss = cycle.loss
            self._entered = False
            self._enter()
            cycle.loss = loss
        assert cycle.loss is not None
        self._taken = None
        return {"loss": cycle.loss, "staleness": cycle.staleness}

    def leave(self) -> None:
        if self._entered:
            self.store.stop_taking(stops=self.rank == 0)


@final
class NetworkServerStep(Step):
    """A rank without batches: it holds shards of the store, and answers workers from the beginning to the end."""

    lockstep = False
    ends_together = False

    def __init__(self, workload: Workload, world: World, places: NetworkPlaces) -> None:
        self._worker = worker = StoreWorker(workload, world.device)
        self.device, self.rank, self._world = world.device, world.rank, world
        self.model, self.optimizers = worker.replica.model, worker.replica.optimizers
        self.source, self.data_shard = worker.source, None
        self._doors = doors_of(world)
        contents = worker.initial()
        self._spec = spec_of(worker, places)
        self._servers = build_servers(self._doors, self._spec, places, lambda: contents)
        self._servers.start()
        self._reader = NetworkStore(self._spec, worker.weights, self._doors, ViewSource(self._doors), CONTROL)

    @property
    def done(self) -> int:
        return max((server.state.done for server in list(self._servers.ranges.values())), default=0)

    def serve(self) -> None:
        serve(self._servers)

    def backward(self, batch: Batch) -> Tensor | None:
        raise AssertionError("a rank without batches calls step.serve()")

    def update(self) -> Mapping[str, Tensor]:
        raise AssertionError("a rank without batches calls step.serve()")

    def predict(self, batch: Batch) -> Any | None:
        return None

    def state_dict(self) -> State:
        found = self._reader.snapshot()
        state = self._worker.state(found.done, found.contents)
        state.settings["unpushed"] = found.queue.unpushed()
        return state

    def load_state_dict(self, state: State) -> None:
        self._worker.load(state)
        group = self._world.group()
        group.barrier()  # everybody has entered
        group.barrier()  # rank 0 has put it into the servers

    def held(self) -> Held:
        servers = list(self._servers.ranges.values())
        return Held(0, sum(flat.nbytes for server in servers for flat in server.state.flats))

    def spent(self) -> Mapping[str, float]:
        return {"loading": 0.0, "waiting": 0.0, "updating": 0.0}

    def close(self) -> None:
        self._reader.close()
        self._servers.close()


LOOK_SECONDS = 0.02
"""The seconds between two looks of a server at whether all workers have ended."""


def serve(servers: ShardServers) -> None:
    """Answer until every worker has ended, or was given up; raise what a thread of the servers has raised."""
    while not servers.closed.wait(LOOK_SECONDS):
        if servers.error is not None:
            raise servers.error
        if servers.is_over():
            return


@final
class OrderedNetworkStep(OrderedRounds, NetworkWorkerStep):
    """The step of a worker, or of a server, in ordered mode."""

    ends_together = True

    def __init__(self, workload: Workload, world: World, schedule: PushPullSchedule, places: NetworkPlaces) -> None:
        super().__init__(workload, world, schedule, places)
        self._servers = None
        if world.rank in places.servers:
            contents = self._worker.initial()
            self._servers = build_servers(self._doors, spec_of(self._worker, places), places, lambda: contents)
            self._servers.start()

    def _enter(self) -> None:
        if not self._entered and self._servers is not None:
            self._entered = True  # a server is not a worker
        super()._enter()

    @property
    def done(self) -> int:
        return self._number

    @property
    def _workers(self) -> Sequence[int]:
        return self.places.workers

    def _meet_round(self, number: int) -> None:
        self._world.group().barrier()

    def _update_in_turn(self, number: int, own: bool) -> Mapping[str, Tensor]:
        values = torch.zeros(2, dtype=torch.float64)
        if own:
            assert self._own is not None
            self._cycle.push(number)
            values[0], values[1] = float(self._own), float(self._turn(number))
            self._own = None
        self._world.group().broadcast(values, source=self._owner(number))
        self._number = number + 1
        return {"loss": values[0].to(torch.float32), "staleness": values[1]}

    def state_dict(self) -> State:
        state = super().state_dict()
        state.settings["unpushed"] = []
        self._world.group().barrier()  # no rank goes on while another still reads
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._base = self._number = state.step

    def close(self) -> None:
        super().close()
        if self._servers is not None:
            self._servers.close()
