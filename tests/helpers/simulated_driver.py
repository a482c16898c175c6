"""The driver of a simulated run: it does with ``Leader``, ``Liveness`` and ``next_action`` what ``HostsPool`` and
``RecoveryLoop`` do with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simulated_hosts import Host, Link, Process, Violation

from apportion.errors import ApportionError
from apportion.runtime.checkpoint.terms import RunTerm
from apportion.runtime.hosts.protocol.leader import AgentOrder, HostSlot
from apportion.runtime.supervisor.failures import (
    Action,
    Finish,
    HostLost,
    Replace,
    Restart,
    Shrink,
    Stop,
    WorkerBegan,
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    WorkerRaised,
    WorkersChanged,
    WorkerStalled,
    next_action,
)

if TYPE_CHECKING:
    from simulated_runs import Simulation

TICK = 1.0
"""The seconds between two looks of a driver at its hosts, in which each says that it is there."""
STALLED_TICKS, LEAVE_TICKS, READY_TICKS = 2, 6, 8
"""The looks after which a worker that is stopped or does not answer is lost, after which a run that is left ends, and
after which a start ends that not all hosts have answered."""
GRACE = 1.0
"""The seconds that a host is waited for once it is suspected."""
CALM_SECONDS = 4.0
"""The seconds without a fault in which a change comes to its end."""


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
        self.begun: set[HostSlot] = set()
        self.seen_stopped: dict[HostSlot, int] = {}
        self.ticks = self.opened = 0
        self._connect(counts)
        sim.table(self)
        sim.after(TICK, self.tick, None)

    def __repr__(self) -> str:
        return f"driver of term {self.term.number} on machine {self.machine}"

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
            if self.action is None or self.lost is not None or self.leaving:
                self.think()

    def take(self, host: int, message: Any) -> None:
        if message is None:
            self.lose(host)
            return
        kind, leader = message[0], self.leader
        if kind == "answered":
            leader.answered(HostSlot(host, message[1]), message[2])
        elif kind == "reserved":
            leader.reserved(host, message[1], "", 0)
        elif kind == "superseded":
            self.end()
        elif kind == "started":
            self.started.add(host)
        else:
            self._take_of(HostSlot(host, message[1]), message)

    def _take_of(self, slot: HostSlot, message: Any) -> None:
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
        stopped: set[HostSlot] = set()
        for host in sorted(self.leader.hosts):
            agent = self.sim.heard(self, host)
            if agent is not None:
                self.liveness.note_heard(host)
                stopped.update(HostSlot(host, worker.slot) for worker in agent.workers.values() if worker.stopped)
        for silence in self.liveness.pass_time(TICK, 0.0):
            if silence.thought == "given up" and silence.host in self.leader.hosts:
                self.lose(silence.host)
        self._look_at(stopped)
        if self.ticks > READY_TICKS and len(self.started) < len(self.hosts):
            self.end()
        self.think()

    def _look_at(self, stopped: set[HostSlot]) -> None:
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

    def close(self, slots: Sequence[HostSlot], fresh: Sequence[HostSlot], losses: tuple[WorkerLost, ...]) -> None:
        self.send_table(lambda: self.leader.close(slots, fresh), fresh)
        self.note(WorkersChanged(losses, len(self.leader.table)))
        self.lost = None

    def dismiss(self) -> None:
        """Has the workers that are left save, and leave."""
        left = [slot for slot in self.leader.table if self.leader.lives(slot)]
        if left:
            self.send_table(lambda: self.leader.close(left, ending=True))
        self.lost, self.leaving = None, True

    def send_table(self, close: Callable[[], list[AgentOrder]], fresh: Collection[HostSlot] = ()) -> None:
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

    def tell(self, messages: Iterable[AgentOrder]) -> None:
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
