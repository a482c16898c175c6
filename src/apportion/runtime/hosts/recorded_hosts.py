"""The hosts of a run, seen from the driver: its record, which gets what rank 0 has not seen; its directory, which is
copied here; and the hosts that were lost, which are asked to take part again."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from apportion.core.event import Event
from apportion.errors import ApportionError, CheckpointError
from apportion.runtime.agents.hosts_launcher import HostsLauncher, RunHost
from apportion.runtime.checkpoint.durable_files import EVENTS, append_events
from apportion.runtime.checkpoint.validation import mark_of
from apportion.runtime.hosts.agent_connection import AgentConnection, News
from apportion.runtime.hosts.frames import FrameError, Message
from apportion.runtime.hosts.host_facts import refuse_unlike, versions
from apportion.runtime.hosts.hosts_pool import HostsPool
from apportion.runtime.hosts.run_copy import RunCopy
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, Shipment, StartedHosts
from apportion.runtime.supervisor.watchdog import Allowance
from apportion.runtime.worker.job import Job

RECORD_SECONDS = 2.0
"""The seconds that an agent may take to write the last events of the run."""
COPY_SECONDS = 60.0
"""The seconds that a host may take to send the next piece of the run directory."""
AGAIN_SECONDS = 2.0
"""The seconds until what has not been reported as written is sent again, which double each time."""
MOST_AGAIN_SECONDS = 32.0
"""The most of these seconds: a rank 0 that is busy has to take each copy, and one that is stopped reads none."""
MOST_WAITING = 10_000
"""The largest number of samples that wait: faults, and the end, are kept whatever their number."""
_SAMPLES = {"speed", "rollouts"}
RETRY_SECONDS = 2.0
"""The seconds between two looks at which hosts are away, and so between two tries to start an agent there."""
HERE_SECONDS, READY_SECONDS = 30.0, 120.0
"""The seconds that an agent may take to speak, and until its workload is open."""
_LOOK_SECONDS = 0.2
SendStart = Callable[[AgentConnection], None]
"""A function that sends an agent which ranks it has, and what they need."""


@final
class RecordedHosts(StartedHosts):
    """The hosts of a run whose directory the first of all ranks writes. Where the run has not begun, it has no record,
    and nothing may be recorded at its end."""

    def __init__(self, job: Job, launcher: HostsLauncher, shipment: Shipment) -> None:
        super().__init__(launcher, shipment, replaceable=job.replaceable)
        self._job = job
        self._pool: HostsPool | None = None
        self._recruiter: Recruiter | None = None
        self._record = DriverRecord()
        self.remarks: list[str] = []
        """The warnings that have not been reported as events yet."""
        self._remarked: set[str] = set()
        self.is_late = False
        """True where something was recorded after rank 0 had drawn its report."""

    # The beginning

    def start_agents(self) -> None:
        """Starts the agents, while signals are held back."""
        self._start_agents()

    def begin_ranks(self) -> HostsPool:
        """Has the ranks started, and returns them. Raises ApportionError where a host cannot take part, ValueError
        where the hosts do not fit each other."""
        self._begin()
        survives = self._replaceable and self._job.strategy.recovers_across_hosts
        self._pool = self._make_pool(self._job.policy, survives=survives)
        return self._pool

    def recruit(self) -> None:
        """Has hosts that are lost asked to take part again, where their ranks can be replaced."""
        if self._replaceable and len(self._hosts) > 1:
            self._recruiter = Recruiter(self._launcher, self._hosts, self.pool, self._begin_again)

    def _begin_again(self, agent: AgentConnection) -> None:
        """Sends an agent what the one before it was sent, of a run that is under way."""
        self._send_prepare(agent, self._addresses)
        self._send_start(agent, self._addresses[0], 0, joins=True)

    @property
    def pool(self) -> HostsPool:
        """The ranks, once they were started."""
        assert self._pool is not None
        return self._pool

    @property
    def has_ranks(self) -> bool:
        """True once the ranks were started."""
        return self._pool is not None

    @property
    def root(self) -> Path:
        """The folder that the user's own modules are from."""
        return self._shipment.root

    @property
    def run_dir_place(self) -> str:
        """The host of rank 0, and the run directory as that host calls it."""
        return f"host {self.pool.host_of(0)}, in {self._run_dir}"

    @property
    def _run_dir(self) -> str:
        return str(Path(self.pool.directory, str(self._job.run_dir)))

    # What ranks send

    def take_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Takes what a rank prints or warns of, and its report of what it has recorded; leaves other messages alone."""
        kind = message["kind"]
        if kind == "output":
            self._print(rank, dict(message))
        elif kind == "noted":
            self._record.note_written(message["numbers"])
        elif kind == "warned":
            self._warn(f"rank {rank} on host {message['host']}: {message['text']}")

    def _warn(self, text: str) -> None:
        """Has a warning reported, once: as an event of the run, which is recorded."""
        if text not in self._remarked:
            self._remarked.add(text)
            self.remarks.append(text)

    def warn_of_remarks(self) -> None:
        """Shows the warnings that cannot become events, since the run has not begun."""
        while self.remarks:
            warnings.warn(self.remarks.pop(0), stacklevel=3)

    # The record

    def record(self, event: Event) -> None:
        """Has an event recorded that rank 0 has not seen."""
        order = self._record.add(event)
        if order is not None and self._pool is not None:
            self._pool.send(order)

    def record_again(self) -> None:
        """Sends rank 0 once more what it has not reported as written for long."""
        if (order := self._record.overdue_order()) is not None and self._pool is not None:
            self._pool.send(order)

    def record_at_end(self, event: Event) -> None:
        """Has an event recorded by ``record_rest`` alone: rank 0 is about to end, or has ended."""
        self._record.add(event)

    def record_rest(self) -> None:
        """Has the agent of rank 0's host write what rank 0 has not reported as written; where that host is lost, it is
        written here."""
        rest = self._record.take_rest()
        if not rest or self._pool is None or self._job.run_dir is None:
            return
        self.is_late = True
        agent = self._pool.agent_of(0)
        agent.send({"kind": "record", "run_dir": self._job.run_dir, "events": [asdict(event) for event in rest]})
        answer = self._answer_of(agent, "recorded", RECORD_SECONDS)
        if answer is None:
            try:
                append_events(Path(self._job.run_dir), rest)
            except OSError as error:
                warnings.warn(f"{len(rest)} events of the run are not recorded: {error}", stacklevel=2)
        elif answer["why"] is not None:
            warnings.warn(f"{len(rest)} events of the run are not recorded: {answer['why']}", stacklevel=2)

    def _answer_of(self, agent: AgentConnection, kind: str, seconds: float) -> Message | None:
        """Returns the answer of an agent, or None where it is gone, or does not answer in time."""
        allowed = Allowance(seconds)
        while allowed.left > 0 and not agent.has_ended:
            news = self._next_message(min(LOOK_SECONDS, allowed.left))
            if news is not None and news[0] == agent.number and isinstance(news[1], dict) and news[1]["kind"] == kind:
                return news[1]
        return None

    def copy_record(self) -> None:
        """Copies the record of a run that has failed, whose checkpoints stay on rank 0's host, unless both hosts see
        the same one."""
        if self._pool is None or self._job.run_dir is None:
            return
        agent = self._pool.agent_of(0)
        if agent.has_ended:
            return
        with suppress(ApportionError, FrameError):
            self._fetch(agent, RECORD_SECONDS, only=[EVENTS])

    def copy_run(self) -> None:
        """Copies the run directory from rank 0's host, unless both hosts see the same one."""
        agent = self.pool.agent_of(0)
        try:
            self._fetch(agent, COPY_SECONDS)
        except (ApportionError, FrameError) as error:
            warnings.warn(
                f"the run is whole on host {agent.host}, in {self._run_dir}, and is not copied here: {error}",
                stacklevel=2,
            )

    def _fetch(self, agent: AgentConnection, seconds: float, only: list[str] | None = None) -> None:
        """Copies the run directory of an agent's host, or these files of it. Raises CheckpointError where nothing comes
        for ``seconds``, or what comes cannot be written; FrameError for what must not be."""
        assert self._job.run_dir is not None
        local = Path(self._job.run_dir)
        agent.send({"kind": "fetch", "run_dir": self._job.run_dir, "known": mark_of(local), "only": only})
        copy, allowed = RunCopy(local), Allowance(seconds)
        try:
            while allowed.left > 0:
                news = self._next_message(LOOK_SECONDS)
                if news is None or news[0] != agent.number:
                    continue
                self._refuse_ended(*news)
                message = news[1]
                if isinstance(message, dict) and message["kind"] == "fetched":
                    if message["copied"]:
                        copy.finish()
                    return
                if isinstance(message, bytes) or (message and message["kind"] in ("file", "folder", "link")):
                    copy.write(message)
                    agent.send({"kind": "more"})
                    allowed = Allowance(seconds)
            raise CheckpointError(f"nothing came for {seconds:.0f} s")
        finally:
            copy.drop()

    # The end

    def close(self) -> None:
        """Ends all agents, those that were to take part again among them, and waits until they are gone."""
        self.remarks.clear()
        if self._recruiter is not None:
            # No agent may be started from here on, and those that were offered are ended with the others.
            self._recruiter.close()
            self._agents += self._recruiter.agents
            self._recruiter.agents = []
        self._close()


@final
class DriverRecord:
    """The events that the driver has seen and rank 0 has not, each with its number, until rank 0 has reported it as
    written.

    Rank 0 may be lost meanwhile, and another one takes its place: what has not been reported as written is sent again,
    and what is left at the end is written by the agent of rank 0's host.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Event] = {}
        self._number = 0
        self._sent, self._pause = 0.0, AGAIN_SECONDS

    def add(self, event: Event) -> dict[str, Any] | None:
        """Adds an event, and returns the order that sends it; None where it is left out, since too many wait."""
        if event.kind in _SAMPLES and len(self._waiting) > MOST_WAITING:
            return None
        if not self._waiting:
            self._sent = time.monotonic()
        self._number += 1
        self._waiting[self._number] = event
        return _note_order([(self._number, event)])

    def note_written(self, numbers: Iterable[int]) -> None:
        """Notes what rank 0 has reported as written."""
        for number in numbers:
            self._waiting.pop(number, None)
        self._sent, self._pause = time.monotonic(), AGAIN_SECONDS

    def overdue_order(self) -> dict[str, Any] | None:
        """Returns the order that sends all that waits once more, where it has waited for long; else None."""
        if not self._waiting or time.monotonic() - self._sent < self._pause:
            return None
        self._sent, self._pause = time.monotonic(), min(2 * self._pause, MOST_AGAIN_SECONDS)
        return _note_order(self._waiting.items())

    def take_rest(self) -> list[Event]:
        """Returns what has not been reported as written, and forgets it."""
        found, self._waiting = list(self._waiting.values()), {}
        return found


def _note_order(events: Iterable[tuple[int, Event]]) -> dict[str, Any]:
    return {"kind": "note", "events": [{"number": number, "event": asdict(event)} for number, event in events]}


@final
class Recruiter:
    """Offers to a pool the workers of hosts that it has lost: an agent is started there, as at first, until one
    answers. It opens the workload before its host is offered, so that the others wait for nothing but the fork of its
    ranks.

    ``begin``: sends an agent that is up what it
    needs to start ranks."""

    def __init__(self, launcher: HostsLauncher, hosts: list[RunHost], pool: HostsPool, begin: SendStart) -> None:
        self._launcher, self._hosts, self._pool, self._send_start = launcher, hosts, pool, begin
        self._closing = threading.Event()
        self._busy: dict[int, threading.Thread] = {}
        self.agents: list[AgentConnection] = []
        """The connections that were offered, which are closed with the others at the end of the run."""
        self._thread = threading.Thread(target=self._watch_hosts, name="recruiter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Starts no more agents, and ends those that were not offered."""
        self._closing.set()
        self._thread.join()
        for thread in list(self._busy.values()):
            thread.join()

    def _watch_hosts(self) -> None:
        while not self._closing.wait(RETRY_SECONDS):
            for number in self._pool.hosts_away():
                if number not in self._busy or not self._busy[number].is_alive():
                    self._busy[number] = threading.Thread(target=self._try_host, args=(number,), daemon=True)
                    self._busy[number].start()

    def _try_host(self, number: int) -> None:
        """Starts an agent on a host, and offers its workers where it gets ready."""
        host, news = self._hosts[number], queue.SimpleQueue[News]()
        try:
            agent = AgentConnection(number, host.destination, self._launcher, self._launcher.start(host), news)
        except (ApportionError, OSError):  # another time
            return
        offered = False
        try:
            facts = self._answer(news, "here", HERE_SECONDS)
            if facts is not None:
                refuse_unlike(versions(), [(host.destination, facts)], self._launcher.device)
                self._send_start(agent)
                offered = self._answer(news, "ready", READY_SECONDS) is not None
        except (ApportionError, ValueError) as error:  # it is not the host that it was
            self._pool.note_refusal(number, str(error))
        finally:
            if offered and not self._closing.is_set():
                self.agents.append(agent)
                self._pool.offer_workers(agent)
            else:
                agent.end()
                agent.close()

    def _answer(self, news: queue.SimpleQueue[News], kind: str, seconds: float) -> dict[str, object] | None:
        """Returns the first message of a kind; None where the agent has ended, or says nothing of the kind in time."""
        allowed = Allowance(seconds)
        while allowed.left > 0 and not self._closing.is_set():
            try:
                _, message = news.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if message is None or (isinstance(message, dict) and message["kind"] == "refused"):
                return None
            if isinstance(message, dict) and message["kind"] == kind:
                return message
        return None
