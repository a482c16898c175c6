"""The record and the directory of a run on several hosts, seen from the driver: what rank 0 has not seen is written,
and what was written on other hosts is copied here."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from apportion.core.event import Event
from apportion.errors import ApportionError, CheckpointError
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.checkpoint.event_lines import EVENTS, append_events
from apportion.runtime.checkpoint.validation import mark_of
from apportion.runtime.hosts.agent_connection import AgentConnection
from apportion.runtime.hosts.driver_record import DriverRecord
from apportion.runtime.hosts.frames import FrameError, Message
from apportion.runtime.hosts.hosts_pool import HostsPool
from apportion.runtime.hosts.run_copy import RunCopy
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, Shipment, StartedHosts
from apportion.runtime.supervisor.recovery import RecoveryLoop
from apportion.runtime.supervisor.watchdog import Allowance
from apportion.runtime.worker.job import Job

RECORD_SECONDS = 2.0
"""The seconds that an agent may take to write the last events of the run."""
COPY_SECONDS = 60.0
"""The seconds that a host may take to send the next piece of the run directory."""


class RecordedHosts(StartedHosts):
    """The hosts of a run whose directory the first of all ranks writes."""

    def __init__(self, job: Job, launcher: HostsLauncher, shipment: Shipment) -> None:
        super().__init__(launcher, shipment, replaceable=job.replaceable)
        self._job = job
        self._pool: HostsPool | None = None
        self._recovery: RecoveryLoop | None = None
        self._last: Event | None = None
        """The last event that a rank has sent, but for speeds; None: the run has not begun."""
        self._record = DriverRecord()
        self.is_late = False
        """True where something was recorded after rank 0 had drawn its report."""

    def _note(self, event: Event) -> None:
        """Has an event recorded that rank 0 has not seen."""
        order = self._record.add(event)
        if order is not None and self._pool is not None:
            self._pool.send(order)

    def _record_rest(self) -> None:
        """Has the agent of rank 0's host write what rank 0 has not reported as written; where that host is lost, it is
        written here. What never began leaves no record."""
        if self._recovery is not None:
            self._recovery.close()  # the answer is read here
        rest = self._record.rest()
        if not rest or self._last is None or self._pool is None or self._job.run_dir is None:
            return
        self.is_late = True
        agent = self._pool.agent_of(0)
        agent.send({"kind": "record", "run_dir": self._job.run_dir, "events": [asdict(event) for event in rest]})
        why = self._answered(agent, "recorded", RECORD_SECONDS)
        if why is None:
            try:
                append_events(Path(self._job.run_dir), rest)
            except OSError as error:
                warnings.warn(f"{len(rest)} events of the run are not recorded: {error}", stacklevel=2)
        elif why["why"] is not None:
            warnings.warn(f"{len(rest)} events of the run are not recorded: {why['why']}", stacklevel=2)

    def _answered(self, agent: AgentConnection, kind: str, seconds: float) -> Message | None:
        """Returns the answer of an agent, or None where it is gone, or does not answer in time."""
        allowed = Allowance(seconds)
        while allowed.left > 0 and not agent.has_ended:
            news = self._next(min(LOOK_SECONDS, allowed.left))
            if news is not None and news[0] == agent.number and isinstance(news[1], dict) and news[1]["kind"] == kind:
                return news[1]
        return None

    def _copy_record(self) -> None:
        """Copies the record of a run that has failed, whose checkpoints stay on rank 0's host, unless both hosts see
        the same one."""
        if self._pool is None or self._job.run_dir is None or self._last is None:
            return
        agent = self._pool.agent_of(0)
        if agent.has_ended:
            return
        with suppress(ApportionError, FrameError):
            self._fetch(agent, RECORD_SECONDS, only=[EVENTS])

    def _copy_run(self) -> None:
        """Copies the run directory from rank 0's host, unless both hosts see the same one."""
        assert self._job.run_dir is not None
        assert self._pool is not None
        agent = self._pool.agent_of(0)
        try:
            self._fetch(agent, COPY_SECONDS)
        except (ApportionError, FrameError) as error:
            warnings.warn(
                f"the run is whole on host {agent.host}, in {self._place}, and is not copied here: {error}",
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
                news = self._next(LOOK_SECONDS)
                if news is None or news[0] != agent.number:
                    continue
                self._refuse_ended(*news)
                message = news[1]
                if isinstance(message, dict) and message["kind"] == "fetched":
                    if message["copied"]:
                        copy.finish()
                    return
                if isinstance(message, bytes) or (message and message["kind"] in ("file", "folder", "link")):
                    copy.take(message)
                    agent.send({"kind": "more"})
                    allowed = Allowance(seconds)
            raise CheckpointError(f"nothing came for {seconds:.0f} s")
        finally:
            copy.drop()

    @property
    def _place(self) -> str:
        """The run directory, as its host calls it."""
        directory = "" if self._pool is None else self._pool.directory
        return str(Path(directory, str(self._job.run_dir)))
