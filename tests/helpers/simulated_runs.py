"""Schedules of faults on simulated hosts (``simulated_hosts.py``): ``Simulation(seed).run()`` raises ``Violation``
where something happens that must not, and does the same again for the same seed. ``simulated_driver.py`` has the
drivers, ``simulated_hosts.py`` the agents and the workers, ``simulated_faults.py`` what goes wrong.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from simulated_driver import Driver
from simulated_faults import FAULTS
from simulated_hosts import Directory, Exchange, Host, Link, Violation, Worker

from apportion.core.policy import Policy
from apportion.parallel.replica.resync import furthest
from apportion.runtime.checkpoint.terms import RunTerm, RunWriter, is_refused, may_write, next_term
from apportion.runtime.hosts.protocol.follower import Follower
from apportion.runtime.hosts.protocol.leader import HostSlot, Leader
from apportion.runtime.hosts.protocol.liveness import Liveness

FAULT_SECONDS = 5.0
"""The seconds in which faults begin."""
LIMIT_SECONDS = 60.0
"""The seconds after the last fault in which a run makes GOAL_STEPS more steps."""
GOAL_STEPS = 2
POLICIES = (Policy(max_restarts=1000), Policy(max_restarts=1000, on_loss="shrink"))


class Parts(NamedTuple):
    """What is held by the simulation, or is a planted mistake in its place."""

    leader: Callable[[Sequence[int]], Leader] = Leader
    follower: Callable[[int], Follower] = Follower
    liveness: Callable[[Iterable[int], float], Liveness] = Liveness
    furthest: Callable[[Sequence[int]], int | None] = furthest
    is_refused: Callable[[RunTerm, RunTerm | None], bool] = is_refused
    may_write: Callable[[RunWriter, RunWriter | None], bool] = may_write
    next_term: Callable[[Iterable[RunTerm | None], str], RunTerm] = next_term


class Table:
    """A table that a driver has sent, with what its ranks do together."""

    __slots__ = ("exchanges", "generation", "hosts", "slots", "term")

    def __init__(self, driver: Driver) -> None:
        self.term, self.generation = driver.term, driver.leader.generation
        self.slots = [(driver.hosts[slot.host].number, slot.number) for slot in driver.leader.table]
        self.hosts = {host for host, _ in self.slots}
        self.exchanges: dict[int, Exchange] = {}


class Simulation:
    """One schedule. ``trace``: what happens is kept in ``log``."""

    def __init__(self, seed: int, parts: Parts = Parts(), *, trace: bool = False) -> None:  # noqa: B008 (immutable)
        self.seed, self.parts, self.rng = seed, parts, random.Random(seed)
        self.random, self.now, self.steps, self.left = self.rng.random, 0.0, 0, GOAL_STEPS
        self.log: list[str] | None = [] if trace else None
        self.queue: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.serial = self.machines = 0
        self.cuts: set[tuple[int, int]] = set()
        self.holding: list[Link] = []
        self.waiting: list[tuple[Worker, Exchange]] = []
        self.tables: dict[tuple[RunTerm, int], Table] = {}
        self.newest: dict[RunTerm, Table] = {}
        """The newest table of each term by which a step was made."""
        self.processes: dict[tuple[int, int], Worker] = {}
        self.policy = POLICIES[self.random() < 0.5]
        self.counts = [1 + int(2 * self.random()) for _ in range(2 + int(2 * self.random()))]
        self.hosts = [Host(self, self.machine()) for _ in self.counts]
        self.directory = Directory(self)
        self.drivers: list[Driver] = []
        self.trouble = 0.0
        """The time at which the last fault so far ends."""
        self.quiet = FAULT_SECONDS
        """The time from which on nothing more goes wrong."""

    # Time

    def machine(self) -> int:
        self.machines += 1
        return self.machines - 1

    def number(self) -> int:
        self.serial += 1
        return self.serial

    def at(self, when: float, call: Callable[[Any], None], about: Any) -> None:
        self.serial += 1
        heapq.heappush(self.queue, (when, self.serial, call, about))

    def after(self, seconds: float, call: Callable[[Any], None], about: Any) -> None:
        self.serial += 1
        heapq.heappush(self.queue, (self.now + seconds, self.serial, call, about))

    def __repr__(self) -> str:
        return "simulation"

    def run(self) -> None:
        """Runs the schedule to its end."""
        self.start(self.hosts)
        self._plan()
        queue, limit = self.queue, self.quiet + LIMIT_SECONDS
        while self.left > 0:
            self.now, _, call, about = heapq.heappop(queue)
            if self.now > limit:
                raise Violation(f"the run makes no more steps, {LIMIT_SECONDS:.0f} s after the last fault")
            if self.log is not None:
                self.log.append(f"{self.now:6.2f} {_told(call, about)}")
            call(about)

    # What starts, and where

    def start(self, hosts: Sequence[Host]) -> None:
        writer = self.directory.writer
        known = [None if writer is None else writer.term, *(host.known for host in hosts)]
        self.drivers.append(Driver(self, self.parts.next_term(known, str(self.number())), hosts))

    def operate(self, _: None) -> None:
        """Starts the run again where nobody drives it, once nothing goes wrong any more; before that, at times."""
        if any(driver.alive for driver in self.drivers):
            return
        if self.now >= self.quiet:
            for host in self.hosts:
                host.alive = True
            self.start(self.hosts)
        elif self.random() < 0.5:
            self.elsewhere(None)
        else:
            self.at(self.quiet, self.operate, None)

    def elsewhere(self, _: None) -> None:
        """Starts the run again on the hosts that can be reached, whatever becomes of other drivers."""
        hosts = [host for host in self.hosts if host.alive and self.random() < 0.8]
        if hosts:
            self.start(hosts)
        else:
            self.at(self.quiet, self.operate, None)

    # The network

    def cut(self, pair: tuple[int, int], seconds: float) -> None:
        self.cuts.add(pair)
        self.after(seconds, self.heal, pair)

    def heal(self, pair: tuple[int, int]) -> None:
        self.cuts.discard(pair)
        holding, self.holding = self.holding, []
        for link in holding:
            link.flush()
        waiting, self.waiting = self.waiting, []
        for worker, exchange in waiting:
            worker.finish(exchange)

    def is_cut_off(self, worker: Worker, exchange: Exchange) -> bool:
        own = worker.agent.host.number
        others = {other.agent.host.number for other in exchange.workers.values()}
        return any((min(own, other), max(own, other)) in self.cuts for other in others)

    def heard(self, driver: Driver, number: int) -> Any:
        """Returns the agent of a driver's host where it can be heard now."""
        host = driver.hosts[number]
        agent = host.agent
        if agent is None or not host.alive or agent.term != driver.term or not agent.alive or agent.stopped:
            return None
        return None if (host.number, driver.machine) in self.cuts else agent

    # What must hold

    def table(self, driver: Driver, fresh: Collection[HostSlot] = ()) -> None:
        """A driver sends a table: nobody else has sent one of this generation in its term, and every process on its
        hosts is in the table and has left what is older."""
        key = driver.term, driver.leader.generation
        if key in self.tables:
            raise Violation(f"two drivers, or tables, in generation {key[1]} of term {key[0].number}")
        self.tables[key] = table = Table(driver)
        hosts = {driver.hosts[host].number for host in driver.leader.hosts}
        begin = {(driver.hosts[slot.host].number, slot.number) for slot in fresh}
        for place, worker in self.processes.items():
            if place[0] in hosts and worker.agent.term == driver.term:
                if place not in table.slots or place in begin:
                    raise Violation(f"a worker that is lost still runs as the table of generation {key[1]} is sent")
                if worker.acknowledged != key[1] - 1:
                    raise Violation(f"a worker has not answered as the table of generation {key[1]} is sent")

    def placed(self, worker: Worker) -> Table:
        """A worker takes a place: the one that the driver's table gives to its slot."""
        agent = worker.agent
        table = self.tables[agent.term, worker.generation]
        if worker.size != len(table.slots):
            raise Violation(f"a worker takes {worker.size} ranks for {len(table.slots)}")
        if not 0 <= worker.rank < worker.size or table.slots[worker.rank] != (agent.host.number, worker.slot):
            raise Violation(f"a worker takes rank {worker.rank}, which the table gives to another one")
        return table

    def entered(self, worker: Worker, table: Table) -> None:
        """A worker gives something to an exchange: the newest table of its term that has made a step is its own, or has
        nobody on its host."""
        newest = self.newest.get(table.term)
        if newest is not None and newest.generation > table.generation and worker.agent.host.number in newest.hosts:
            raise Violation(f"generations {table.generation} and {newest.generation} make steps at once")
        if worker.acknowledged > table.generation:
            raise Violation(f"a worker goes on in generation {table.generation}, which it has left")

    def running(self, worker: Worker) -> None:
        key = worker.agent.host.number, worker.slot
        if key in self.processes:
            raise Violation(f"slot {key[1]} of host {key[0]} has two processes")
        self.processes[key] = worker

    def ended(self, worker: Worker) -> None:
        del self.processes[worker.agent.host.number, worker.slot]

    def stepped(self, exchange: Exchange) -> None:
        """All ranks of a table have given their rows of a step."""
        table = exchange.table
        if self.newest.get(table.term, table).generation <= table.generation:
            self.newest[table.term] = table
        if exchange.step >= self.steps:
            self.steps = exchange.step + 1
        if self.now >= self.quiet and any(driver.alive and driver.term == table.term for driver in self.drivers):
            self.left -= 1

    # What goes wrong

    def _plan(self) -> None:
        draw = self.random
        for _ in range(1 + int(4 * draw())):
            when, seconds = 0.5 + FAULT_SECONDS * draw(), 0.2 + 7.0 * draw() ** 2
            self.quiet = max(self.quiet, when + seconds + 0.1)
            self.at(when, self.fail, (FAULTS[int(len(FAULTS) * draw())], draw(), seconds))
        self.at(self.quiet + 0.1, self.operate, None)

    def fail(self, fault: tuple[Callable[[Any], None], float, float]) -> None:
        """Has something go wrong."""
        call, draw, seconds = fault
        self.trouble = max(self.trouble, self.now + seconds)
        call((self, draw, seconds))


def _told(call: Callable[[Any], None], about: Any) -> str:
    """Returns what happens, in words."""
    name = getattr(call, "__name__", "")
    if isinstance(about, tuple) and about and callable(about[0]):
        return f"FAULT: {about[0].__name__}, {about[1]:.3f}, for {about[2]:.1f} s"
    owner = getattr(call, "__self__", "")
    return f"{owner} {name} {'' if about is None else about}"


def explore(seeds: Iterable[int], parts: Parts = Parts()) -> int | None:  # noqa: B008 (immutable)
    """Runs the schedules of these seeds; returns the first in which something happens that must not, or None."""
    gc.collect()
    gc.freeze()  # torch is loaded: looking through its objects again and again would take most of the time
    try:
        for seed in seeds:
            try:
                Simulation(seed, parts).run()
            except Violation:
                return seed
    finally:
        gc.unfreeze()
    return None


def replay(seed: int, parts: Parts = Parts()) -> str:  # noqa: B008 (immutable)
    """Returns what happens in the schedule of a seed, and what it violates, as text."""
    simulation = Simulation(seed, parts, trace=True)
    violated = "nothing"
    try:
        simulation.run()
    except Violation as violation:
        violated = str(violation)
    assert simulation.log is not None
    counts, policy = simulation.counts, simulation.policy.on_loss
    lines = [f"seed {seed}: hosts of {counts} workers, on_loss={policy}", *simulation.log, f"violated: {violated}"]
    return "\n".join(lines)
