"""Schedules of faults on simulated hosts (``simulated_hosts.py``): ``Simulation(seed).run()`` raises ``Violation`` where
something happens that must not, and does the same again for the same seed.

A driver does with ``Leader``, ``Liveness`` and ``next_action`` what ``HostsPool`` and ``RecoveryLoop`` do with them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from simulated_faults import FAULTS
from simulated_hosts import Directory, Exchange, Host, Link, Process, Violation, Worker

from apportion.core.policy import Policy
from apportion.errors import ApportionError
from apportion.parallel.replica.resync import furthest
from apportion.runtime.checkpoint.terms import RunTerm, RunWriter, is_refused, may_write, next_term
from apportion.runtime.hosts.follower import Follower
from apportion.runtime.hosts.leader import Leader, Slot, Tell
from apportion.runtime.hosts.liveness import Liveness
from apportion.runtime.supervisor.decisions import Action, Finish, Replace, Restart, Shrink, Stop, next_action
from apportion.runtime.supervisor.failures import (
    HostLost,
    WorkerBegan,
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    WorkerRaised,
    WorkersChanged,
    WorkerStalled,
)

TICK = 1.0
"""The seconds between two looks of a driver at its hosts, in which each says that it is there."""
STALLED_TICKS, LEAVE_TICKS, READY_TICKS = 2, 6, 8
"""The looks after which a worker that is stopped or does not answer is lost, after which a run that is left ends, and
after which a start ends that not all hosts have answered."""
GRACE = 1.0
CALM_SECONDS = 4.0
"""The seconds without a fault in which a change comes to its end."""
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


class Driver(Process):
    """The driver of one start, on a machine of its own. Its hosts are numbered as they are given to it."""

    def __init__(self, sim: Simulation, term: RunTerm, hosts: Sequence[Host]) -> None:
        super().__init__(sim)
        self.machine, self.term, self.hosts = sim.machine(), term, hosts
        counts = [sim.counts[host.number] for host in hosts]
        self.leader = sim.parts.leader(counts)
        self.liveness = sim.parts.liveness(range(len(hosts)), GRACE)
        self.down: list[Link] = []
        self.up: list[Link] = []
        self.happened: list[WorkerEvent] = []
        self.ranks = len(self.leader.table)
        self.action: Action | None = None
        self.lost: list[int] | None = None
        self.leaving = self.has_begun = False
        self.started: set[int] = set()
        self.begun: set[Slot] = set()
        self.seen_stopped: dict[Slot, int] = {}
        self.ticks = self.opened = 0
        self._connect(counts)
        sim.table(self)
        sim.after(TICK, self.tick, None)

    def _connect(self, counts: Sequence[int]) -> None:
        sim, first = self.sim, 0
        for number, (host, count) in enumerate(zip(self.hosts, counts, strict=True)):
            pair = (host.number, self.machine)
            down = Link(sim, pair, host.hear)
            up = Link(sim, pair, lambda message, number=number: self.hear((number, message)))
            table = {"first": first, "size": self.ranks, "slots": list(range(count)), "ending": False}
            first += count
            self.down.append(down)
            self.up.append(up)
            down.send((self.term, up, down, table))

    # What is heard

    def hear(self, said: tuple[int, Any]) -> None:
        if self.stopped:
            self.inbox.append((self.hear, said))
        elif self.alive and said[0] in self.leader.hosts:
            self.take(*said)
            self.think()

    def take(self, host: int, message: Any) -> None:
        if message is None:
            self.lose(host)
            return
        kind, leader = message[0], self.leader
        if kind == "answered":
            leader.answered(Slot(host, message[1]), message[2])
        elif kind == "reserved":
            leader.reserved(host, message[1], "", 0)
        elif kind == "superseded":
            self.end()
        elif kind == "started":
            self.started.add(host)
        else:
            self._take_of(Slot(host, message[1]), message)

    def _take_of(self, slot: Slot, message: Any) -> None:
        kind, leader = message[0], self.leader
        if kind == "exited":
            leader.exited(slot)
        if slot not in leader.table:
            return
        rank = leader.table.index(slot)
        if kind == "exited":
            self.note(WorkerExited(rank, message[2], step=self.sim.steps))
        elif kind == "raised":
            self.note(WorkerRaised(rank, "", "", **message[2]))
        elif kind == "finished":
            self.note(WorkerFinished(rank))
        elif kind == "begun":
            self.begun.add(slot)
            if not self.has_begun and self.begun.issuperset(leader.table):
                self.has_begun = True
                self.happened.append(WorkerBegan())

    def note(self, event: WorkerEvent) -> None:
        self.happened.append(event)
        self.action = None

    def lose(self, host: int) -> None:
        ranks = tuple(rank for rank, slot in enumerate(self.leader.table) if slot.host == host)
        self.leader.drop(host)
        self.liveness.forget(host)
        self.note(HostLost(ranks, str(host), "", self.sim.steps))
        self.down[host].send(None)

    def tick(self, _: None) -> None:
        if not self.alive:
            return
        self.sim.after(TICK, self.tick, None)
        if self.stopped:
            return
        self.ticks += 1
        stopped: set[Slot] = set()
        for host in sorted(self.leader.hosts):
            agent = self.sim.heard(self, host)
            if agent is not None:
                self.liveness.heard(host)
                stopped.update(Slot(host, worker.slot) for worker in agent.workers.values() if worker.stopped)
        for silence in self.liveness.pass_time(TICK, 0.0):
            if silence.thought == "given up" and silence.host in self.leader.hosts:
                self.lose(silence.host)
        self._look_at(stopped)
        if self.ticks > READY_TICKS and len(self.started) < len(self.hosts):
            self.end()
        self.think()

    def _look_at(self, stopped: set[Slot]) -> None:
        """Notes who is stopped for too long, or does not answer."""
        self.seen_stopped = seen = {slot: self.seen_stopped.get(slot, 0) + 1 for slot in stopped}
        late = [r for r, slot in enumerate(self.leader.table) if seen.get(slot, 0) >= STALLED_TICKS] if seen else []
        if late and not any(isinstance(h, WorkerStalled) for h in self.happened[self._changed() :]):
            self.note(WorkerStalled(tuple(late), self.sim.steps, 0.0, stopped=True))
        if self.lost is not None and self.ticks - self.opened >= STALLED_TICKS:
            silent = [rank for rank in self.leader.asked() if rank not in self.lost]
            if silent:
                self.opened = self.ticks
                self.note(WorkerStalled(tuple(silent), self.sim.steps, 0.0, silent=True))
                self.tell(self.leader.kill(silent))

    def _changed(self) -> int:
        return max((at for at, h in enumerate(self.happened, 1) if isinstance(h, WorkersChanged)), default=0)

    # What is decided

    def think(self) -> None:
        """Decides and acts as long as something follows."""
        while self.alive and self._thought():
            pass

    def _thought(self) -> bool:
        """Does what follows from what is known; returns whether more may follow from that."""
        if self.leaving:
            return self._leave()
        settled = self.lost is not None and self.settled()
        if self.action is None:
            self.action = next_action(self.happened, self.ranks, 0.0, policy=self.sim.policy, survives=True)
        action = self.action
        if isinstance(action, Replace | Shrink):
            lost = [loss.rank for loss in action.losses]
            if self.lost is None:
                self.open(lost)
            elif len(lost) != len(self.lost):
                self.lost = lost
            elif settled:
                self.change(action)
            else:
                return False
            return True
        if isinstance(action, Stop) and action.lost and len(action.lost) < len(self.leader.table):
            self.leaving, self.ticks = True, 0
            self.open(list(action.lost))
            return True
        if isinstance(action, Stop | Restart | Finish):
            self.end()
        elif settled:
            self.dismiss()
        return False

    def open(self, lost: list[int]) -> None:
        self.lost, self.opened = lost, self.ticks
        self.tell(self.leader.kill(lost))
        self.tell(self.leader.open())

    def settled(self) -> bool:
        assert self.lost is not None
        self.tell(self.leader.kill(self.leader.undead(self.lost)))
        return self.leader.can_close

    def change(self, action: Replace | Shrink) -> None:
        table, losses = self.leader.table, action.losses
        gone = {table[loss.rank] for loss in losses}
        if isinstance(action, Shrink):
            self.close([slot for slot in table if slot not in gone], [], losses)
        else:
            self.close(table, [slot for slot in gone if slot.host in self.leader.hosts], losses)

    def close(self, slots: Sequence[Slot], fresh: Sequence[Slot], losses: tuple[WorkerLost, ...]) -> None:
        self.send_table(lambda: self.leader.close(slots, fresh), fresh)
        self.note(WorkersChanged(losses, len(self.leader.table)))
        self.lost = None

    def dismiss(self) -> None:
        """Has the workers that are left save, and leave."""
        left = [slot for slot in self.leader.table if self.leader.lives(slot)]
        if left:
            self.send_table(lambda: self.leader.close(left, ending=True))
        self.lost, self.leaving = None, True

    def send_table(self, close: Callable[[], list[Tell]], fresh: Collection[Slot] = ()) -> None:
        try:
            told = close()
        except ApportionError:  # no worker is left
            self.end()
        else:
            self.sim.table(self, fresh)
            self.tell(told)

    def _leave(self) -> bool:
        if self.lost is not None and self.settled():
            self.dismiss()
        if self.ticks > LEAVE_TICKS and self.lost is not None and self.sim.trouble < self.sim.now - CALM_SECONDS:
            raise Violation("a run that stops does not have the workers that are left save")
        if self.ticks > LEAVE_TICKS or not any(map(self.leader.lives, self.leader.table)):
            self.end()
        return False

    def tell(self, messages: Iterable[Tell]) -> None:
        for told in messages:
            self.down[told.host].send(told.message)

    def end(self, *, silent: bool = False) -> None:
        """Ends, and its connections with it, unless the whole machine does."""
        if self.alive:
            self.alive = False
            if not silent:
                for link in self.down:
                    link.send(None)
            self.sim.after(TICK, self.sim.operate, None)


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
                self.log.append(f"{self.now:6.2f} {_named(call)} {about if about is not None else ''}")
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

    def table(self, driver: Driver, fresh: Collection[Slot] = ()) -> None:
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


def _named(call: Callable[[Any], None]) -> str:
    owner = getattr(call, "__self__", None)
    return f"{'' if owner is None else type(owner).__name__ + '.'}{getattr(call, '__name__', call)}"
