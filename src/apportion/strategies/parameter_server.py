"""parameter_server: Downpour SGD. Workers push gradients into a store of shards and pull weights, each when it likes.

Papers: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD, algorithm 7.1); Ho et al., "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013 (``max_staleness``).

::

    batches    handed out one by one, to the worker that is ready
    worker 0   pull -> forward, backward -> push      pull -> forward, ...
    worker 1        pull -> forward, backward ----------> push    pull -> ...
                      |                                     |
    store      [ shard 0 v7 | shard 1 v7 | shard 2 v6 | ... ]   weights and optimizer slots, a lock and a version each

Approximate: a gradient is computed on weights that others have changed since; by how many pushes is its staleness.
Every push is applied whole, exactly once, and written down, so the run can be done again in one process and compared to
the last bit. ``mode="ordered"``: of each round of as many batches as there are workers, every gradient is that of the
weights the round begins with, and they are applied in rank order; worker i's is i updates old, always. ``mode=
"hogwild"``: no locks. With one worker each of them is the one-device step. ``servers=n``: that many processes more,
which take no batches, hold the shards and answer each worker by itself. On several hosts there must be one at least,
and with ``copies=1`` a server on another host has each push before it counts (``parallel/parameter_store/network/``).
``of=tensor_parallel()``: each of the ``replicas`` is a group of processes that hold the network in parts, with a store
for each place (``parallel/parameter_store/grouped_step.py``).

Price: ``t = max(t_compute(B) / n, t_push)`` a batch, ``t_push = (5 + 3 slots) bytes(weights) / bandwidth(memory)``;
with servers on other hosts ``t_push = 2 bytes(weights) / bandwidth(link) + 4 latencies`` alone, and where all push
``n bytes(weights) / (bandwidth(link) servers)`` a batch of each.

Wins when workers differ in speed, or batches in length: no worker waits. Loses where the weights move much between a
pull and a push (many workers, large learning rates), and in memory: the weights, two copies of the slots, and for each
worker a gradient and the weights that it has pulled.

A worker's death loses the gradients that it had not pushed; its batches are handed out again, and the others do not
stop. A server's loses nothing: the shards are in memory that outlives it, or, on several hosts, with its copy. With
``of`` the run goes back to its last checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final, get_args

from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import Computed, computed
from apportion.cost_model.constraints import must_have_store
from apportion.cost_model.cost import Cost, MemoryUse, copies, of_replica
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.parameter_store import PushPrice, across_hosts, push
from apportion.parallel.optim.hyperparameters import named
from apportion.parallel.parameter_store.grouped_step import GroupsStep
from apportion.parallel.parameter_store.network.network_step import (
    NetworkDownpourStep,
    NetworkPlaces,
    NetworkServerStep,
    OrderedNetworkStep,
    must_have_servers,
)
from apportion.parallel.parameter_store.push_pull import Mode, PushPullSchedule
from apportion.parallel.parameter_store.replay import ordered_reference, replay
from apportion.parallel.parameter_store.server_step import ServerStep
from apportion.parallel.parameter_store.worker_step import DownpourStep, OrderedStep
from apportion.parallel.partition.replica_groups import check_of, check_replicas, how_many, slowest_group
from apportion.parallel.replica.step import reference


def _in_order(found: Computed, once: PushPrice, workers: int) -> dict[str, float]:
    """Returns the times of one update of a round: all compute at once, then they push one after the other."""
    whole = {
        "computing": found.both,
        "updating": workers * once.push,
        "communicating": once.gather + once.pull,
        "waiting": found.waiting,
        "loading": found.loading,
    }
    return {what: seconds / workers for what, seconds in whole.items()}


@final
@dataclass(frozen=True, repr=False)
class ParameterServer(Strategy):
    """Workers that take batches as they come, and a store of weights that they share."""

    exact = False
    survives = True

    push_every: int = 1
    """The number of batches whose gradients are summed before they are pushed (the paper's n_push)."""
    pull_every: int = 1
    """The number of batches between two pulls; meanwhile the worker takes plain steps of its own (n_fetch)."""
    servers: int = 0
    """The number of processes that hold the shards; 0: they lie in memory that the workers share."""
    copies: int = 0
    """1: a push is acknowledged when a server on another host has it too, which goes on where the first is lost."""
    mode: Mode = "sharded"
    """The way in which the store is locked. "sharded": a lock a shard. "hogwild": none. "ordered": in rank order, round
    by round."""
    rule: str | None = None
    """The rule that is used instead of the workload's optimizer: "adagrad(lr=0.01)", "sgd(...)", "momentum(...)",
    "rmsprop(...)", "adam(...)"."""
    max_staleness: int | None = None
    """A worker more than this many pushes ahead of the slowest waits for it. None: never."""

    of: Strategy | None = None
    """The kind of a worker: a strategy that splits the network among some of the processes. None: one process."""
    replicas: int | None = None
    """The number of such workers with ``of``; None: as ``of`` says by its number of stages, or else the fewest."""

    def __post_init__(self) -> None:
        self._must_be_whole("push_every", "pull_every")
        self._must_be_whole("servers", "max_staleness", least=0)
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} must be one of {', '.join(map(repr, get_args(Mode)))}")
        if self.mode == "ordered" and (self.push_every, self.pull_every, self.max_staleness) != (1, 1, None):
            raise ValueError('mode="ordered" pushes every batch and pulls every round: leave the other settings out')
        if self.servers and self.mode == "hogwild":
            raise ValueError(f'servers={self.servers} take locks: leave mode="hogwild" out')
        self._must_be_whole("copies", least=0)
        if self.copies > 1 or (self.copies and not self.servers):
            raise ValueError(
                f"copies={self.copies} must be 0 or 1, and copies go with servers: give servers=2 or more, on several "
                "hosts, or leave copies out"
            )
        if self.rule is not None:
            object.__setattr__(self, "rule", str(named(self.rule)))

        self._check_groups()

    def _check_groups(self) -> None:
        check_replicas(self.replicas)
        if self.of is None:
            if self.replicas is not None:
                raise ValueError(f"replicas={self.replicas} goes with of=, as of=tensor_parallel(): leave it out")
            return
        check_of(self.of)
        given = {"push_every": 1, "pull_every": 1, "servers": 0, "max_staleness": None}
        for name, usual in given.items():
            if getattr(self, name) != usual:
                raise ValueError(
                    f"{name}={getattr(self, name)} is of workers that are one process each, and with of={self.of} a "
                    "worker is a group, which pulls and pushes with every batch: leave it out"
                )

    @property
    def _rhythm(self) -> PushPullSchedule:
        return PushPullSchedule(self.mode, self.push_every, self.pull_every, self.max_staleness)

    def _ruled(self, workload: Workload) -> Workload:
        return workload if self.rule is None else replace(workload, optimizer=named(self.rule).optimizer)

    def ranks(self, workers: int) -> int:
        return workers + self.servers

    def replays(self, workers: int) -> bool:
        if self.of is not None:
            return False
        alone = workers == 1 and (self.push_every, self.pull_every) == (1, 1)
        return self.mode == "sharded" and not alone

    @property
    def recovers_across_hosts(self) -> bool:
        return False

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[ParameterServer]:
        if layout.ranks > 1:
            yield cls(servers=1) if len(layout.hosts) > 1 else cls()

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        must_have_store(profile, layout, servers=self.servers)
        if self.of is not None:
            return self._cost_of_groups(self.of, profile, layout)
        workers = layout.ranks - self.servers
        if workers < 1:
            raise ValueError(f"servers={self.servers} leaves no worker among {layout.ranks} processes: start more")
        once = push(profile, layout, locks=self.mode != "hogwild")
        in_turns = self.mode == "ordered"
        found = computed(
            profile, layout.part(range(workers)), [profile.batch_size] * workers, between=1.0 if in_turns else math.inf
        )
        terms = _in_order(found, once, workers) if in_turns else self._apart(found, once, workers)
        if len(layout.hosts) > 1:
            terms = self._over_cables(terms, profile, layout, workers)
        many, ranks = (1 if in_turns else workers), layout.ranks
        store = copies(profile, weights=1, slots=1 if self.mode == "hogwild" else 2, buffers=2)
        own = of_replica(profile, profile.batch_size)
        own = {**own, "gradients": 2 * own.get("gradients", 0.0), "slots": 0.0}
        return Cost(
            terms=terms,
            memory=MemoryUse(own=own, shared=store).a_worker(ranks),
            examples=profile.batch_size * many,
        )

    def _apart(self, found: Computed, once: PushPrice, workers: int) -> dict[str, float]:
        """Returns the times of a worker's way through one batch; where it waits, it is for the store, which is a
        queue."""
        pulls_alone = self.pull_every % self.push_every != 0
        gathering = once.gather + (1.5 * once.gather if self.pull_every > 1 else 0.0)  # a step of its own
        pulling = once.pull / self.pull_every if pulls_alone or self.servers else 0.0
        applying = once.push / max(1, self.servers) / self.push_every
        alone = found.both + found.loading + gathering + pulling + applying
        # Shards are updated side by side, by as many workers as there are shards; a server updates one push at a time.
        busy = workers * applying / (1 if self.servers else once.shards)
        return {
            "computing": found.both,
            "updating": applying,
            "communicating": gathering + pulling,
            "waiting": max(0.0, busy - alone),
            "loading": found.loading,
        }

    def _over_cables(
        self, terms: dict[str, float], profile: Profile, layout: Placement, workers: int
    ) -> dict[str, float]:
        """Returns the times with what travels between hosts, where pushes wait for each other on a server's cable."""
        price = across_hosts(profile, layout, workers=workers, servers=self.servers, copies=self.copies)
        turns = 1 if self.mode == "ordered" else self.push_every
        found = {**terms, "communicating": terms["communicating"] + price.alone / turns}
        short = price.busy / turns - sum(found.values())
        return {**found, "waiting": found["waiting"] + max(0.0, 0.0 if self.mode == "ordered" else short)}

    def _cost_of_groups(self, of: Strategy, profile: Profile, layout: Placement) -> Cost:
        """Returns the cost of a round, of one batch for each group."""
        groups = how_many(of, self.replicas, layout.ranks)
        size = layout.ranks // groups
        inner = slowest_group(of, profile, layout, groups, profile.batch_size)
        once = push(profile, layout, part=1 / size, locks=self.mode != "hogwild")
        turns = groups if self.mode == "ordered" else 1
        terms = {**inner.terms, "updating": once.push * turns}
        terms["communicating"] = inner.terms.get("communicating", 0.0) + once.gather
        store = copies(profile, weights=(1 / groups + 1) / size, gradients=1 / size, slots=2 / groups / size)
        memory = {what: inner.memory.get(what, 0) + round(store.get(what, 0.0)) for what in {**inner.memory, **store}}
        return Cost(
            terms={what: seconds / turns if turns > 1 else seconds for what, seconds in terms.items()},
            memory=memory,
            examples=profile.batch_size * (1 if turns > 1 else groups),
        )

    def build(self, workload: Workload, world: World) -> Step:
        ruled = self._ruled(workload)
        if self.of is not None:
            return GroupsStep(ruled, world, self._rhythm, self.of, self.replicas)
        if world.local_size < world.size:
            return self._build_across_hosts(ruled, world)
        if self.servers and self.mode != "sharded":
            raise ValueError(f'servers={self.servers} go with mode="sharded" on one host: leave mode={self.mode!r} out')
        if self.copies:
            raise ValueError("copies=1 keeps a copy of each shard on another host, and there is one: leave copies out")
        if self.servers >= world.slots:
            raise ValueError(f"servers={self.servers} leaves no worker among {world.slots} processes: start more")
        if world.slot >= world.slots - self.servers:
            return ServerStep(ruled, world, servers=self.servers)
        kind = OrderedStep if self.mode == "ordered" else DownpourStep
        return kind(ruled, world, self._rhythm, servers=self.servers)

    def _build_across_hosts(self, workload: Workload, world: World) -> Step:
        must_have_servers(self, self.servers, world.size)
        places = NetworkPlaces.choose(world.hosts(), servers=self.servers, copies=self.copies)
        if self.mode == "ordered":
            return OrderedNetworkStep(workload, world, self._rhythm, places)
        if world.rank in places.servers:
            return NetworkServerStep(workload, world, places)
        return NetworkDownpourStep(workload, world, self._rhythm, places)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        ruled = self._ruled(workload)
        if log:
            (pushes,) = log
            return iter([replay(ruled, pushes, self._rhythm)])
        workers = world_size if self.of is None else how_many(self.of, self.replicas, world_size)
        if self.mode == "ordered":
            return ordered_reference(ruled, workers)
        if self.of is not None and workers > 1:
            raise ValueError(
                f"{self} computes something else in each run, and its groups write no log to replay: check "
                f'it with mode="ordered", or with replicas=1'
            )
        if workers == 1 and (self.push_every, self.pull_every) == (1, 1):
            return reference(ruled)
        raise ValueError(
            f"{self} on {world_size} workers computes something else in each run, which only its log records: "
            'replay that, or check parameter_server(mode="ordered")'
        )
