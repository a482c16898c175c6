"""A run on several hosts without any: drivers, agents and workers as they act on messages and on time, over a network
and a clock that a seed decides. The state machines are those of the package; what must hold is checked all the time.

Here are the hosts: an agent does with ``Follower`` what ``HostRanks`` and ``HostMembers`` do, a worker what the loop of
a training does: it steps in lockstep with the ranks of its table, leaves when the generation changes, agrees on the
furthest state, and goes on. A state is the tuple of the exchanges that it was made by, so that two contents of one step
are two different tuples. ``simulated_runs.py`` has the drivers, the network, the clock and the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from apportion.core.sampler import DataShard
from apportion.runtime.checkpoint.terms import RunTerm, RunWriter

if TYPE_CHECKING:
    from simulated_runs import Simulation, Table

BATCH = 13
"""The rows of every batch."""
DELAY, LOOK, REAP, STEP = 0.2, 0.3, 0.2, 1.2
"""The longest that a message, a look at the page, the notice of a process's end and an exchange take, in seconds."""
ALL_ROWS = (1 << BATCH) - 1
AGREEMENT = -1
"""The step of an exchange in which ranks agree on the state that they go on from."""
State = tuple[int, ...]


class Violation(AssertionError):
    """Something happened that must not happen."""


@cache
def rows_of(rank: int, size: int) -> int:
    """The rows of a batch that a rank is dealt, one bit each."""
    rows = DataShard(rank, size).rows(BATCH)
    return sum(1 << row for row in range(rows.start, rows.stop))


class Process:
    """Something that is alive or not, and does what happens to it later while it is stopped."""

    __slots__ = ("alive", "inbox", "sim", "stopped")

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.alive, self.stopped = sim, True, 0
        self.inbox: list[tuple[Callable[[Any], None], Any]] = []

    def stop(self, seconds: float) -> None:
        self.stopped += 1
        self.sim.after(seconds, self.resume, None)

    def resume(self, _: None) -> None:
        self.stopped -= 1
        if not self.stopped:
            inbox, self.inbox = self.inbox, []
            for call, about in inbox:
                call(about)


def says_generation(message: Any) -> bool:
    """True where a message says of which generation it is, so that it may come again later, and harms nobody."""
    if isinstance(message, dict):
        return "generation" in message
    return message is not None and message[0] in ("answered", "reserved")


class Link:
    """One direction of a connection: messages arrive in order, are held back while it is cut, and end with None.
    ``repeats``: the seconds after which messages that say their generation come once more."""

    __slots__ = ("closed", "deliver", "held", "last", "pair", "repeats", "sim")

    def __init__(self, sim: Simulation, pair: tuple[int, int], deliver: Callable[[Any], None]) -> None:
        self.sim, self.pair, self.deliver = sim, pair, deliver
        self.held: list[Any] = []
        self.last, self.closed, self.repeats = 0.0, False, 0.0

    def __repr__(self) -> str:
        return f"link of machines {self.pair}"

    def send(self, message: Any) -> None:
        if not self.closed:
            sim = self.sim
            when = sim.now + DELAY * sim.random()
            if when > self.last:
                self.last = when
            sim.at(self.last, self.arrive, message)
            if self.repeats and says_generation(message):
                sim.at(self.last + self.repeats * sim.random(), self.arrive, message)
            self.closed = message is None

    def arrive(self, message: Any) -> None:
        if self.held or self.pair in self.sim.cuts:
            if not self.held:
                self.sim.holding.append(self)
            self.held.append(message)
        else:
            self.deliver(message)

    def flush(self) -> None:
        held, self.held = self.held, []
        for message in held:
            self.arrive(message)


class Exchange:
    """What the ranks of a table do together once: a step, or the agreement before the first one."""

    __slots__ = ("number", "outcome", "rows", "sim", "states", "step", "table", "workers")

    def __init__(self, sim: Simulation, table: Table, step: int) -> None:
        self.sim, self.table, self.step, self.number = sim, table, step, sim.number()
        self.workers: dict[int, Worker] = {}
        self.states: dict[int, State | None] = {}
        self.rows = 0
        self.outcome: State | None = None

    def __repr__(self) -> str:
        what = "agreement" if self.step == AGREEMENT else f"step {self.step}"
        return f"{what} in generation {self.table.generation} of term {self.table.term.number}"

    def add(self, worker: Worker) -> None:
        """A rank gives what it has, and gets the outcome once all have given theirs."""
        rank, workers, sim = worker.rank, self.workers, self.sim
        if rank in workers:
            raise Violation(f"two workers have rank {rank} in generation {self.table.generation}")
        workers[rank], self.states[rank] = worker, worker.state
        self.rows += rows_of(rank, worker.size)
        if len(workers) == len(self.table.slots):
            if self.step == AGREEMENT:
                self._agree()
            else:
                self._step()
            for each in workers.values():
                sim.after(STEP * sim.random(), each.finish, self)

    def _step(self) -> None:
        sim, base = self.sim, self.states[0]
        assert base is not None
        for state in self.states.values():
            if state is not base and state != base:
                raise Violation(f"the ranks of generation {self.table.generation} make a step from different states")
        if self.rows != ALL_ROWS:
            raise Violation(f"in step {len(base)} a row is computed by nobody, or twice")
        self.outcome = (*base, self.number)
        sim.stepped(self)

    def _agree(self) -> None:
        sim, table = self.sim, self.table
        if table.generation == 0:
            self.outcome = sim.directory.begin(RunWriter(table.term, 0))
            return
        states = [self.states[rank] or () for rank in range(len(table.slots))]
        source = sim.parts.furthest(list(map(len, states)))
        if source is None:
            return
        longest = max(states, key=len)
        if any(longest[: len(state)] != state for state in states):
            raise Violation(f"before generation {table.generation} a step was made twice, with two contents")
        if len(states[source]) < len(longest):
            raise Violation(f"generation {table.generation} forgets a step that one of its ranks has made")
        if sim.directory.begin(RunWriter(table.term, table.generation)) is not None:
            self.outcome = states[source]


class Directory:
    """The run directory, on a disk that all hosts see."""

    __slots__ = ("sim", "state", "writer")

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.state = sim, (sim.number(),)
        self.state: State
        self.writer: RunWriter | None = None

    def begin(self, writer: RunWriter) -> State | None:
        """Lets rank 0 of a generation write from now on, and returns the state that is there; None where it may not."""
        if not self.sim.parts.may_write(writer, self.writer):
            return None
        self._check(writer)
        self.writer = writer
        return self.state

    def write(self, writer: RunWriter, state: State) -> bool:
        if self.begin(writer) is None:
            return False
        if state[: len(self.state)] != self.state:
            raise Violation(f"a checkpoint of step {len(state)} has steps of other contents than the one before it")
        self.state = state
        return True

    def _check(self, writer: RunWriter) -> None:
        if self.writer is not None:
            before = self.writer.term
            if writer.term != before and writer.term.number <= before.number:
                raise Violation(f"term {writer.term.number} writes after term {before.number}")
            if writer.term == before and writer.generation < self.writer.generation:
                raise Violation(f"generation {writer.generation} writes after generation {self.writer.generation}")


class Worker(Process):
    """One worker process, in a slot of its host."""

    __slots__ = ("acknowledged", "agent", "exchange", "generation", "rank", "saving", "size", "slot", "state", "table")

    def __init__(self, agent: Agent, slot: int) -> None:
        super().__init__(agent.sim)
        self.agent, self.slot, self.state = agent, slot, None
        self.state: State | None
        self.acknowledged = self.generation = self.rank = -1
        self.size, self.saving = 0, 0.0
        self.exchange: Exchange | None = None
        self.table: Table | None = None
        self.sim.running(self)
        self.wake()

    def __repr__(self) -> str:
        return f"worker {self.slot} of host {self.agent.host.number}, rank {self.rank},"

    def wake(self) -> None:
        self.sim.after(LOOK * self.sim.random(), self.look, None)

    def look(self, _: None) -> None:
        """Looks at the page, as every wait does."""
        if self.stopped:
            self.inbox.append((self.look, None))
        elif self.alive:
            generation = self.agent.follower.generation
            if generation & 1:
                if self.acknowledged < generation:
                    self.leave(generation)
            elif generation != self.generation and self.slot in self.agent.follower.slots:
                self.join(generation)

    def leave(self, generation: int) -> None:
        self.acknowledged, self.exchange = generation, None
        self.sim.after(LOOK * self.sim.random(), self.agent.hear_answer, (self.slot, generation))

    def join(self, generation: int) -> None:
        agent = self.agent
        self.generation, self.size = generation, agent.page["size"]
        self.rank = agent.page["first"] + list(agent.follower.slots).index(self.slot)
        self.table = self.sim.placed(self)
        self.enter(AGREEMENT)

    def enter(self, step: int) -> None:
        table = self.table
        assert table is not None
        self.sim.entered(self, table)
        exchange = table.exchanges.get(step)
        if exchange is None:
            exchange = table.exchanges[step] = Exchange(self.sim, table, step)
        self.exchange = exchange
        exchange.add(self)

    def finish(self, exchange: Exchange) -> None:
        """Gets the outcome of an exchange, unless it has left it."""
        if self.exchange is not exchange or not self.alive:
            return
        if self.stopped:
            self.inbox.append((self.finish, exchange))
        elif self.sim.cuts and self.sim.is_cut_off(self, exchange):
            self.sim.waiting.append((self, exchange))
        else:
            self.take(exchange)

    def take(self, exchange: Exchange) -> None:
        generation = exchange.table.generation
        if self.acknowledged > generation:
            raise Violation(f"a worker goes on in generation {generation}, which it has left")
        if exchange.outcome is None:
            self.fail(state_lost=generation > 0)
            return
        if self.rank == 0 and exchange.step > 0 and exchange.step % 2 == 0:
            self.submit(exchange.outcome[:-1])  # all have made the step before, or this one could not be made
        began, self.state = self.state is None, exchange.outcome
        if exchange.step == AGREEMENT and self.agent.page["ending"]:
            if self.rank == 0:
                self.save(self.state)
            self.agent.tell(("finished", self.slot))
            self.end(0)
            return
        if began:
            self.agent.tell(("begun", self.slot))
        self.enter(len(self.state))

    def submit(self, state: State) -> None:
        """Has a state saved in the background, after those before it."""
        self.saving = max(self.saving, self.sim.now + STEP * self.sim.random())
        self.sim.at(self.saving, self.save, state)

    def save(self, state: State) -> None:
        if self.stopped:
            self.inbox.append((self.save, state))
        elif self.alive and not self.sim.directory.write(RunWriter(self.agent.term, self.generation), state):
            self.fail(checkpoint=True)

    def fail(self, **what: bool) -> None:
        """Raises, tells what, and ends."""
        if self.alive and not self.stopped:
            self.agent.tell(("raised", self.slot, what))
            self.end(1)

    def end(self, code: int = -9) -> None:
        if self.alive:
            self.alive = False
            self.sim.ended(self)
            self.sim.after(REAP * self.sim.random(), self.agent.reap, (self, code))


class Agent(Process):
    """The agent of a host in one start of the run."""

    __slots__ = ("follower", "host", "page", "term", "up", "workers")

    def __init__(self, host: Host, term: RunTerm, up: Link, table: dict[str, Any]) -> None:
        super().__init__(host.sim)
        self.host, self.term, self.up, self.page = host, term, up, table
        self.follower = host.sim.parts.follower(len(table["slots"]))
        self.workers = {slot: Worker(self, slot) for slot in table["slots"]}

    def __repr__(self) -> str:
        return f"agent of host {self.host.number} in term {self.term.number}"

    def tell(self, message: Any) -> None:
        if self.stopped:
            self.inbox.append((self.tell, message))
        elif self.alive:
            self.up.send(message)

    def hear(self, order: Any) -> None:
        if self.stopped:
            self.inbox.append((self.hear, order))
        elif self.alive:
            if order is None:
                self.end()
            else:
                self.obey(order)

    def obey(self, order: dict[str, Any]) -> None:
        kind, follower, before = order["kind"], self.follower, self.follower.generation
        if kind == "kill":
            for slot in order["slots"]:
                if slot in self.workers:
                    self.workers[slot].end()
        elif kind == "open":
            if follower.open(order["generation"], list(self.workers)):
                self.tell(("reserved", order["generation"]))
                self._wake()
        elif (taken := follower.close(order, self.workers)) is not None:
            self.page = order
            for slot in taken.left_out:
                self.workers[slot].end()
            for slot in taken.fresh:
                self.workers[slot] = Worker(self, slot)
            self._wake()
        if follower.generation < before:
            raise Violation(f"the page goes back from generation {before} to {follower.generation}")

    def _wake(self) -> None:
        for worker in self.workers.values():
            if worker.alive:
                worker.wake()

    def hear_answer(self, said: tuple[int, int]) -> None:
        if self.stopped:
            self.inbox.append((self.hear_answer, said))
        elif self.alive and self.follower.note_answer(*said):
            self.up.send(("answered", *said))

    def reap(self, ended: tuple[Worker, int]) -> None:
        if self.stopped:
            self.inbox.append((self.reap, ended))
        elif self.alive:
            worker, code = ended
            if self.workers.get(worker.slot) is worker:
                del self.workers[worker.slot]
            self.up.send(("exited", worker.slot, code))

    def end(self, *, silent: bool = False) -> None:
        """Ends with its workers. ``silent``: the host has ended, and the connection does not say so."""
        if self.alive:
            self.alive = False
            for worker in self.workers.values():
                worker.end()
            if not silent:
                self.up.send(None)


class Host:
    """One machine, and the highest term that it knows of."""

    __slots__ = ("agent", "alive", "known", "number", "sim")

    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim, self.number, self.alive = sim, number, True
        self.known: RunTerm | None = None
        self.agent: Agent | None = None

    def __repr__(self) -> str:
        return f"host {self.number}"

    def hear(self, order: Any) -> None:
        """Starts an agent, or refuses. What comes for one that was refused is lost."""
        if isinstance(order, tuple) and self.alive:
            self.start(*order)

    def start(self, term: RunTerm, up: Link, down: Link, table: dict[str, Any]) -> None:
        if self.sim.parts.is_refused(term, self.known):
            up.send(("superseded",))
            return
        if self.known is not None and term.number <= self.known.number:
            raise Violation(f"a host that knows term {self.known.number} obeys a driver of term {term.number}")
        self.known = term
        if self.agent is not None and self.agent.alive:
            self.agent.tell(("superseded",))
            self.agent.end()
        self.agent = Agent(self, term, up, table)
        down.deliver = self.agent.hear
        up.send(("started",))

    def end(self) -> None:
        self.alive = False
        if self.agent is not None:
            self.agent.end(silent=True)
