"""The record and the directory of a run on several hosts, seen from the driver: what rank 0 has not seen is written,
and what was written on other hosts is copied here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from apportion.core.event import Event
from apportion.errors import ApportionError, CheckpointError
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.checkpoint.event_lines import EVENTS, append_events
from apportion.runtime.checkpoint.validation import mark_of
from apportion.runtime.hosts.agent_connection import AgentConnection
from apportion.runtime.hosts.driver_record import DriverRecord
from apportion.runtime.hosts.frames import FrameError, Message
from apportion.runtime.hosts.hosts_pool import HostsPool
from apportion.runtime.hosts.recruiting import Recruiter
from apportion.runtime.hosts.run_copy import RunCopy
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, Shipment, StartedHosts
from apportion.runtime.supervisor.watchdog import Allowance
from apportion.runtime.worker.job import Job

RECORD_SECONDS = 2.0
"""The seconds that an agent may take to write the last events of the run."""
COPY_SECONDS = 60.0
"""The seconds that a host may take to send the next piece of the run directory."""


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
