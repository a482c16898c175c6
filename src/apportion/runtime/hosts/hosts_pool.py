"""The worker processes of several hosts as one pool, by way of their agents (as ``supervisor/worker_pool.py`` is on one
host)."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

from apportion.core.policy import Policy
from apportion.errors import ApportionError, WorkerFailed
from apportion.runtime.hosts.agent_connection import AgentConnection, News
from apportion.runtime.hosts.frames import Message
from apportion.runtime.hosts.host_failures import raised_event, rank_at_host
from apportion.runtime.hosts.protocol.leader import AgentOrder, HostSlot, Leader
from apportion.runtime.hosts.protocol.liveness import AbsentHosts, Liveness, Silence, TornLinks
from apportion.runtime.supervisor.failures import (
    Action,
    HostLost,
    Notice,
    Replace,
    Restart,
    Shrink,
    Stop,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    host_text,
    ranks_text,
)
from apportion.runtime.supervisor.rank_pool import KILL_SECONDS, OpenChange, PoolHistory, RankPool
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Allowance, LookClock, Watchdog
from apportion.runtime.worker import progress


@dataclass
class _HostsAway:
    """The hosts that a run has lost, and those of them that are there again."""

    absent: AbsentHosts
    """Those that are waited for."""
    offered: deque[AgentConnection] = field(default_factory=deque)
    """The agents of those whose workers could take part."""
    joining: set[int] = field(default_factory=set)
    """Those that take part from the next table on."""
    refusals: list[str] = field(default_factory=list)
    """Why they cannot take part again; the recruiter's threads add to it."""
    refusals_reported: int = 0
    just_saved: bool = False
    """True where a checkpoint was just reported, from which all may begin again with them."""


@final
class HostsPool(RankPool):
    """The ranks of a run on several hosts. ``agents``: the connection to each host's; ``counts``: its number of ranks;
    ``news``: what the agents send. ``pids`` of a pool are those of this host, and here there are none."""

    def __init__(
        self,
        agents: Sequence[AgentConnection],
        counts: Sequence[int],
        news: queue.SimpleQueue[News],
        policy: Policy,
        *,
        replaceable: bool,
        survives: bool,
    ) -> None:
        history = PoolHistory(sum(counts), policy, survives=survives, restarts=replaceable)
        super().__init__(history, replaceable=replaceable)
        self._agents, self._news, self.survives = list(agents), news, survives
        self.leader = Leader(counts)
        self._lines = progress.lines(bytearray(progress.NBYTES * sum(counts)))
        self._watch = Watchdog(self._lines)
        self._stopped: set[HostSlot] = set()
        self._liveness = Liveness(range(len(counts)), policy.grace_seconds())
        self._clock = LookClock()
        self._began_at, self._late_by = time.monotonic(), dict[HostSlot, float]()
        self._counts = list(counts)
        self._torn = TornLinks()
        self._away = _HostsAway(AbsentHosts(policy.wait_seconds() if policy.on_host_loss == "wait" else None))
        self.directory = ""
        """The folder in which the ranks of the first host work."""
        self._notices: list[Notice] = []
        """The notices about silent hosts that the user has not had yet."""

    # From any thread

    def pids(self) -> list[int]:
        """Returns no process ids: those of other hosts mean nothing here."""
        return []

    def wake(self) -> None:
        """Makes ``hear`` return now."""
        self._news.put((-1, None))

    def _send(self, order: Mapping[str, Any], ranks: Sequence[int] | None) -> None:
        """Sends an order to the first of all ranks, which the others follow."""
        self._agents[self.leader.table[0].host].send(order)

    def hosts_away(self) -> list[int]:
        """Returns the hosts that take no part, and of which no workers are offered."""
        offered = {agent.number for agent in list(self._away.offered)}
        return [h for h in range(len(self._counts)) if h not in self.leader.hosts and h not in offered]

    def note_refusal(self, host: int, why: str) -> None:
        """Has it reported, once, why a host that is away cannot take part again."""
        name = self._agents[host].host
        cause = f"host {name} cannot take part again: {why.removeprefix(f'host {name}: ')}"
        if cause not in self._away.refusals:
            self._away.refusals.append(cause)

    def offer_workers(self, agent: AgentConnection) -> None:
        """Offers the workers of a host that is away, whose agent is ready to fork them."""
        self._away.offered.append(agent)
        self.wake()

    # What happens

    @property
    def ranks(self) -> int:
        """The number of ranks that are in the run."""
        return len(self.leader.table)

    @property
    def step(self) -> int:
        """The number of updates made, as far as the ranks show it."""
        return self._watch.step

    def hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields what ranks say within this time, and returns after the first words. What happens to them is noted."""
        self._away.just_saved = False
        for host, message in self._next_messages(seconds):
            if message is None and host >= 0:
                self._drop_host(host, self._agents[host].why_ended())
            elif isinstance(message, dict) and host in self.leader.hosts:
                # Whatever an agent sends is a sign of life, also of a host that was suspected. A message of a host that
                # was given up is dropped above: others may have its ranks by now, and two processes must never write as
                # one rank.
                self._act_on_silences(self._liveness.note_heard(host))
                yield from (self._stop_after_notice if message["kind"] == "notice" else self._take_message)(
                    host, message
                )

    def _next_messages(self, seconds: float) -> list[News]:
        """Returns what the agents have said, once they say something within this time."""
        heard: list[News] = []
        with suppress(queue.Empty):
            heard.append(self._news.get(timeout=seconds) if seconds > 0 else self._news.get_nowait())
            while True:
                heard.append(self._news.get_nowait())
        return heard

    def _stop_after_notice(self, host: int, message: Message) -> Iterator[tuple[int, Message]]:
        """Orders all ranks to stop, since a host has the notice to end: at once, whatever the driver's own thread is
        doing."""
        self.send({"kind": "stop", "notice": message["signal"]})
        rank = next((rank for rank, slot in enumerate(self.leader.table) if slot.host == host), 0)
        yield rank, {**message, "cause": f"host {self._agents[host].host} was told to end by {message['name']}"}

    def _take_message(self, host: int, message: Message) -> Iterator[tuple[int, Message]]:
        if (wrong := self._refusal_of(host, message)) is not None:
            self._drop_host(host, f"what its agent sent is not valid ({wrong})")
            self._agents[host].abandon()
        else:
            yield from self._take_checked(host, message)

    def _take_checked(self, host: int, message: Message) -> Iterator[tuple[int, Message]]:
        kind = message["kind"]
        if kind == "progress":
            self._note_progress(host, message)
        elif kind == "answered":
            self.leader.answered(HostSlot(host, message["slot"]), message["generation"])
        elif kind == "reserved":
            self.leader.reserved(host, message["generation"], message["address"], message["port"])
        elif kind == "started" and host == 0:
            self.directory = message["directory"]
        elif kind == "refused":
            why = f"host {self._agents[host].host}: {message['why']}"
            if not self._begun:  # it cannot take part
                raise ApportionError(why)
            self._drop_host(host, why)
        elif "slot" in message:
            slot = HostSlot(host, message.pop("slot"))
            if kind == "exited":
                self.leader.exited(slot)
            # A message of a slot that is not in the table is a late one of a process that is out of the run.
            if slot in self.leader.table:
                yield from self._take_rank_message(slot, message)

    def _refusal_of(self, host: int, message: Message) -> str | None:
        """Returns what is wrong with a message about workers that its host does not have; None where nothing is."""
        count, has_progress = self._counts[host], message["kind"] == "progress"
        slots = message["stopped"] if has_progress else [message["slot"]] if "slot" in message else []
        if any(slot >= count for slot in slots):
            return f"its message {message['kind']!r} is about worker {max(slots)}, and it has {count}"
        lines = message["lines"] if has_progress else []
        if len(lines) > count or any(len(line) != progress.WORDS for line in lines):
            return f"its message 'progress' has {len(lines)} lines, and it has {count} workers"
        return None

    def _take_rank_message(self, slot: HostSlot, message: Message) -> Iterator[tuple[int, Message]]:
        rank, kind = self.leader.table.index(slot), message["kind"]
        name, step = self._agents[slot.host].host, self._watch.step_of(self._line(slot))
        if kind == "exited":
            status = 1 if message["status"] is None else message["status"]
            self.history.add(WorkerExited(rank, status, out_of_memory=message["out_of_memory"], step=step, host=name))
        elif kind == "finished":
            self.history.add(WorkerFinished(rank))
        elif kind == "torn":
            self._torn.note_torn(message["generation"] == self.leader.generation, time.monotonic())
        elif kind == "raised":
            self.history.add(raised_event(message, rank, step))
            yield rank, message
        else:
            if kind == "event":
                self._note_event(slot, message["event"])
            yield rank, {**message, "host": name}

    def _note_event(self, slot: HostSlot, event: Message) -> None:
        if slot in self._late_by:  # it counts from its own start
            event["seconds"] += self._late_by[slot]
        if event["kind"] == "checkpoint":
            self.leader.saved = self._away.just_saved = True

    def _note_progress(self, host: int, message: Message) -> None:
        # Progress that was sent before all began again may arrive after that, and is of processes that have ended.
        if message["generation"] < self.leader.began:  # of processes that are gone
            return
        first, lines = self._line(HostSlot(host, 0)), message["lines"]
        self._lines[first : first + len(lines)] = lines
        self._stopped = {slot for slot in self._stopped if slot.host != host}
        self._stopped |= {HostSlot(host, number) for number in message["stopped"]}

    def _line(self, slot: HostSlot) -> int:
        """Returns the number of the line of a slot, among those of all hosts."""
        return sum(self._counts[: slot.host]) + slot.number

    def _drop_host(self, host: int, why: str) -> None:
        """Notes that a host takes part in nothing more."""
        ranks = tuple(rank for rank, slot in enumerate(self.leader.table) if slot.host == host)
        # Once: the end of a connection, an invalid message and a silence may all say the same of one host. The leader
        # goes first, so that no order is sent there any longer by what follows.
        if host in self.leader.hosts:
            self.leader.drop(host)
            self._liveness.forget(host)
            self._away.joining.discard(host)
            lost = HostLost(ranks, self._agents[host].host, why, self._watch.step)
            self.history.add(lost)
            why = host_text(lost)
            done = ranks and not self.finishing and self._away.absent.add(host, time.monotonic(), why)
            self._notices += [Notice(ranks[0], why, done)] if done else []

    def _act_on_silences(self, changed: Iterable[Silence]) -> None:
        for silence in changed:
            name = self._agents[silence.host].host
            ranks = tuple(rank for rank, slot in enumerate(self.leader.table) if slot.host == silence.host)
            cause = f"host {name} ({ranks_text(ranks)}) has said nothing for {silence.seconds:.1f} s"
            if silence.thought == "given up":
                self._drop_host(
                    silence.host, f"it has said nothing for {silence.seconds:.1f} s: it was stopped, or cut off"
                )
                # The connection is cut as well: the agent ends its ranks when its input ends, should it run after all.
                self._agents[silence.host].abandon()
            elif ranks:  # no rank waits for a host whose workers are all gone
                suspected = silence.thought == "suspected"
                action = f"is waited for, {self._liveness.grace:g} s at most" if suspected else "it is back"
                self._notices.append(Notice(ranks[0], cause, action))

    def notices(self) -> list[Notice]:
        """Returns what the user is to know since the last call."""
        still = self._watch.notices()
        self.send_orders(AgentOrder(self.leader.table[notice.rank].host, {"kind": "stacks"}) for notice in still)
        named = [replace(n, cause=rank_at_host(n.cause, n.rank, self.host_of(n.rank))) for n in still]
        refused = [
            Notice(0, cause, "goes on without it") for cause in self._away.refusals[self._away.refusals_reported :]
        ]
        self._away.refusals_reported += len(refused)
        found, self._notices = [*self._notices, *named, *refused], []
        return found

    def _pass_time(self) -> float:
        """Looks at who has been silent for how long; returns the time."""
        now = time.monotonic()
        self._act_on_silences(self._liveness.pass_time(self._clock.passed(now), self._watch.pace or None))
        return now

    def action(self) -> Action:
        """Decides what to do about all that has happened so far."""
        now = self._pass_time()
        overdue = self._away.absent.overdue(now)
        if self._replaceable and not self._away.absent:  # for a host that is waited for all others wait
            self._note_begun(self._watch)
            stopped = [rank for rank, slot in enumerate(self.leader.table) if slot in self._stopped]
            silent = [rank for rank, slot in enumerate(self.leader.table) if self._liveness.is_suspected(slot.host)]
            late = self._watch.late(now, stopped, [*silent, *self.history.finished])
            hosts = tuple(map(self.host_of, range(self.ranks)))
            if late is not None and self.history.add_late(replace(late, hosts=hosts), stopped):
                self.send_orders(AgentOrder(host, {"kind": "stacks"}) for host in sorted(self.leader.hosts))
        action = self.history.action()
        if isinstance(action, Replace | Shrink | Restart) and not self.leader.hosts:
            return Stop(action.losses[0].rank, f"{action.losses[0].cause}; no other host is left")
        if isinstance(action, Replace | Shrink) and overdue is not None:
            lost = tuple(loss.rank for loss in action.losses)
            return Stop(lost[0], overdue, lost=lost)
        if isinstance(action, Replace | Shrink | Restart):
            return replace(action, losses=tuple(map(self._at_host, action.losses)))
        if isinstance(action, Stop):
            return replace(action, host=self.host_of(action.rank))
        return action

    def _at_host(self, loss: WorkerLost) -> WorkerLost:
        return replace(loss, cause=rank_at_host(loss.cause, loss.rank, self.host_of(loss.rank)))

    def agent_of(self, rank: int) -> AgentConnection:
        """Returns the connection to the agent of the host that a rank runs on."""
        return self._agents[self.leader.table[rank].host]

    def host_of(self, rank: int) -> str:
        """Returns the name of the host that a rank runs on."""
        return self._agents[self.leader.table[min(rank, self.ranks - 1)].host].host

    # A change of who is in the run

    def open_change(self, lost: Collection[int]) -> HostsChange:
        """Opens a change of the membership: these ranks are lost and killed, and all others have to answer."""
        # A lost process may only be stopped, and would write again one day: it is killed, and waited for, in any case.
        self.send_orders(self.leader.kill(lost))
        self.send_orders(self.leader.open())
        return HostsChange(self, self._watch)

    def offered(self) -> bool:
        """Tells whether workers are offered that could take part."""
        waiting = bool(self._away.offered) and (self.survives or self._away.just_saved)
        return (waiting or self._torn.is_old(time.monotonic())) and self._begun and not self.finishing

    def admit(self) -> HostsChange:
        """Opens a change of the membership in which the workers that are offered are taken in, and all connect anew.
        Raises WorkerFailed where connections between hosts are lost again and again."""
        self._torn.note_reconnected(self.step)
        self._take_offered()
        self.send_orders(self.leader.open())
        return HostsChange(self, self._watch)

    def _take_offered(self) -> None:
        while self._away.offered:
            agent = self._away.offered.popleft()
            host = agent.number
            self._agents[host] = agent
            agent.hand_over(self._news)
            self.leader.add_host(host)
            self._away.absent.remove(host)
            self._liveness.expect(host)
            self._lines[self._line(HostSlot(host, 0)) :][: self._counts[host]] = 0
            self._away.joining.add(host)

    def take_awaited(self) -> bool:
        """Begins the open change anew with hosts that were waited for, where such are offered; returns whether it
        does."""
        if again := bool(self._away.absent and self._away.offered):
            self._take_offered()
            self.send_orders(self.leader.open())
        return again

    @property
    def waits(self) -> bool:
        """True while a change stays open for a host that is waited for."""
        return bool(self._away.absent) and not self._stopping

    def grow(self) -> None:
        """Closes the change in which no rank was lost."""
        self._close(self.leader.table, [], [])

    def send_orders(self, orders: Iterable[AgentOrder]) -> None:
        """Sends orders to agents."""
        for order in orders:
            self._agents[order.host].send(order.message)

    def replace(self, losses: Sequence[WorkerLost]) -> list[WorkerLost]:
        """Puts new processes in the places of the lost ones, on the hosts that are left, and closes the change. Returns
        the losses in whose places there are none."""
        table = self.leader.table
        fresh = [table[loss.rank] for loss in losses if table[loss.rank].host in self.leader.hosts]
        away = [loss for loss in losses if table[loss.rank].host not in self.leader.hosts]
        self._close(table, fresh, losses)
        return away

    def shrink(self, losses: Sequence[WorkerLost]) -> None:
        """Closes the change without the lost workers."""
        gone = {self.leader.table[loss.rank] for loss in losses}
        self._close([slot for slot in self.leader.table if slot not in gone], [], losses)

    def _close(
        self,
        slots: Sequence[HostSlot],
        fresh: Sequence[HostSlot],
        losses: Sequence[WorkerLost],
        *,
        begins: bool = False,
    ) -> None:
        hosts = sorted(self._away.joining & self.leader.hosts)
        joined = [HostSlot(host, number) for host in hosts for number in range(self._counts[host])]
        joined = [slot for slot in joined if slot not in slots]  # a host that was waited for has kept its ranks
        self._away.joining.clear()
        slots, fresh = [*slots, *joined], [*fresh, *joined]
        for slot in fresh:
            self._watch.reset(self._line(slot))
            self._late_by[slot] = time.monotonic() - self._began_at
        self.send_orders(self.leader.close(slots, fresh, begins=begins))
        self._torn.forget()
        for host in hosts:
            ranks = tuple(rank for rank, slot in enumerate(self.leader.table) if slot.host == host)
            cause = f"host {self._agents[host].host} takes part again, with {ranks_text(ranks)}"
            self._notices.append(Notice(ranks[0], cause, f"goes on with {self.ranks} workers"))
        # After the table is sent, and before any answer to it can be heard, since both happen in this thread.
        self.history.add_change(losses, self.ranks, restarted=begins)
        self._watch.assign_slots([self._line(slot) for slot in self.leader.table])
        if self._stopping:
            self.send({"kind": "stop"})

    def dismiss(self) -> None:
        """Closes the change for the workers that are left, which are to save and to leave."""
        left = [slot for slot in self.leader.table if self.leader.lives(slot)]
        if left:
            self.send_orders(self.leader.close(left, ending=True))
            self._watch.assign_slots([self._line(slot) for slot in left])

    def restart(self, losses: Sequence[WorkerLost]) -> Iterator[tuple[int, Message]]:
        """Ends every process, and begins again with others, on the hosts that are left. Yields what ranks still say.
        Raises WorkerFailed where a process has not ended within KILL_SECONDS."""
        self._take_offered()
        everyone = range(self.ranks)
        change = self.open_change(everyone)
        while not change.settled(everyone) and self.leader.hosts:
            yield from self.hear(LOOK_SECONDS)
            if (overdue := self._away.absent.overdue(self._pass_time())) is not None:
                raise WorkerFailed(overdue)
        slots = [slot for slot in self.leader.table if slot.host in self.leader.hosts]
        if slots:  # else what happened meanwhile ends the run
            self._begun = False
            self._close(slots, slots, losses, begins=True)

    def prepare_spare(self) -> None:
        """Does nothing: each agent has its own."""

    # Ending

    def _may_report(self) -> bool:
        return any(map(self.leader.lives, self.leader.table))

    def hear_out(self, rank: int, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields what ranks say until this one has ended, or the time is up."""
        slot, allowed = self.leader.table[min(rank, self.ranks - 1)], Allowance(seconds)
        while self.leader.lives(slot) and (left := allowed.left) > 0:
            yield from self.hear(min(LOOK_SECONDS, left))

    def close(self) -> None:
        """Lets go of the ranks; the agents end them when their connections end."""


@final
class HostsChange(OpenChange):
    """An open change of the membership of several hosts, until its table can be sent."""

    def __init__(self, pool: HostsPool, watch: Watchdog) -> None:
        self._pool, self._leader, self._watch, self._silence = pool, pool.leader, watch, watch.silence()

    def settled(self, lost: Collection[int]) -> bool:
        """Tells whether the lost have ended, or are back with the hosts that are waited for, and all others have
        answered or ended. A rank that does not answer is ended. Raises WorkerFailed where a killed process has not
        ended within KILL_SECONDS."""
        if self._pool.take_awaited():
            self._silence = self._watch.silence()
        asked = [rank for rank in self._leader.asked() if rank not in lost]
        late = self._silence.broken_by(asked, time.monotonic()) if asked else None
        if late is not None:
            self._pool.history.add(late)
            self._pool.send_orders(self._leader.kill(late.ranks))
        undead = self._leader.undead(lost)
        self._pool.send_orders(self._leader.kill(undead))  # also who was found to be lost since the change was opened
        if undead and self._pool.history.quiet > KILL_SECONDS:
            raise WorkerFailed(
                f"rank {min(undead)} was killed, and has not ended within {KILL_SECONDS:.0f} s: it waits for a "
                "device, or the process that it was forked from is stopped"
            )
        return self._leader.can_close and not self._pool.waits
