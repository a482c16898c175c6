"""Hosts that a run has lost are asked to take part again: an agent is started there, as at first, until one answers.

It opens the workload before its host is offered, so that the others wait for nothing but the fork of its ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

from apportion.errors import ApportionError
from apportion.runtime.agents.hosts_launcher import HostsLauncher, RunHost
from apportion.runtime.hosts.agent_connection import AgentConnection, News
from apportion.runtime.hosts.host_facts import refuse_unlike, versions
from apportion.runtime.hosts.hosts_pool import HostsPool
from apportion.runtime.supervisor.watchdog import Allowance

RETRY_SECONDS = 2.0
"""The seconds between two looks at which hosts are away, and so between two tries to start an agent there."""
HERE_SECONDS, READY_SECONDS = 30.0, 120.0
"""The seconds that an agent may take to speak, and until its workload is open."""
_LOOK_SECONDS = 0.2
SendStart = Callable[[AgentConnection], None]
"""A function that sends an agent which ranks it has, and what they need."""


@final
class Recruiter:
    """Offers to a pool the workers of hosts that it has lost. ``begin``: sends an agent that is up what it
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
