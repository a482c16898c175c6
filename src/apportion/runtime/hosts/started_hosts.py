"""Several hosts as the driver sees them: starts an agent on each, has it start its ranks, hears them, and ends them.

What is done with them, a run or a verb that returns a value, is a class of its own (``hosts_run``, ``hosts_verb``).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from apportion.core.fast_paths import VARIABLE as PLAIN_PATHS
from apportion.core.policy import Policy
from apportion.errors import ApportionError, WorkerFailed
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.hosts.agent_connection import AgentConnection, News
from apportion.runtime.hosts.frames import Message
from apportion.runtime.hosts.host_facts import overload, ranks_of, refuse_unlike, unlike_patches, versions
from apportion.runtime.hosts.hosts_pool import HostsPool
from apportion.runtime.supervisor.watchdog import Allowance

READY_SECONDS = 30.0
"""The seconds that an agent may take to speak: a launcher itself gives up earlier where a host does not answer."""
LONGEST_GRACE = "28 s"
"""The time that a silent host is waited for where nothing can go on without it."""
LOOK_SECONDS = 0.5
"""The seconds between two looks at whether Ctrl-C has come."""
END_SECONDS = 8.0
"""The seconds that agents may take to end their ranks and remove their folders."""
WORDS_SECONDS = 2.0
"""The seconds in which what ranks have printed still arrives after their reports of how they ended."""
TRAVELS = (PLAIN_PATHS,)
"""The variables of the driver's environment that the ranks are given."""


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """What goes to every host."""

    code: bytes
    """The bundle of the user's own modules (``code_bundle``)."""
    root: Path
    """The folder that they are from."""
    path: Sequence[str]
    """The folders in it that modules are found in, relative to it."""
    payload: bytes
    """The pickled job that the ranks open."""


class StartedHosts:
    """The hosts of one run or verb, and the ranks on them. ``shipment``: what the ranks are given."""

    def __init__(self, launcher: HostsLauncher, shipment: Shipment, *, replaceable: bool = False) -> None:
        self._launcher, self._shipment, self._replaceable = launcher, shipment, replaceable
        self._hosts = launcher.parsed()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._agents: list[AgentConnection] = []
        self._counts: list[int] = []
        """The number of ranks of each host."""
        self._addresses: list[str] = []
        """The address of each host, as the others reach it."""
        self._threads: list[int] = []
        """The number of threads of each rank, by host."""
        self._secret, self._run = secrets.token_hex(32).encode(), secrets.token_hex(8)

    # The beginning

    def _start_agents(self) -> None:
        """Starts the agents, while Ctrl-C is held back: no agent may be started and not known."""
        for number, host in enumerate(self._hosts):
            process = self._launcher.start(host)
            self._agents.append(AgentConnection(number, host.destination, self._launcher, process, self._news))

    def _begin(self) -> None:
        """Hears where everything is, compares, and has the ranks started."""
        facts = self._answers("here", READY_SECONDS, "has not answered", self._agents)
        named = [(agent.host, fact) for agent, fact in zip(self._agents, facts, strict=True)]
        refuse_unlike(versions(), named, self._launcher.device)
        for unlike in unlike_patches(versions(), named):
            self._warn(unlike)
        with_gpus = self._launcher.device != "cpu" and any(fact["gpus"] for fact in facts)
        self._replaceable = self._replaceable and not with_gpus
        wanted = [host.workers for host in self._hosts]
        self._counts = [ranks_of(f, w, self._launcher.device) for f, w in zip(facts, wanted, strict=True)]
        threads = [self._launcher.threads_each(f["cores"], n) for f, n in zip(facts, self._counts, strict=True)]
        for (name, fact), count, each in zip(named, self._counts, threads, strict=True):
            if (warning := overload(name, fact, count, each + self._launcher.loaders)) is not None:
                self._warn(warning)
        for agent in self._agents:
            self._send_prepare(agent, [str(fact["address"]) for fact in facts])
        (place,) = self._answers("place", READY_SECONDS, "has not said where the ranks meet", self._agents[:1])
        self._try_to_meet(place)
        self._addresses, self._threads = [str(fact["address"]) for fact in facts], threads
        for agent in self._agents:
            self._send_start(agent, place["address"], place["port"])

    def _warn(self, text: str) -> None:
        """Warns of something that ends nothing."""
        warnings.warn(text, stacklevel=3)

    def _send_prepare(self, agent: AgentConnection, addresses: Sequence[str]) -> None:
        others = [address for number, address in enumerate(addresses) if number != agent.number]
        agent.send({"kind": "prepare", "first": agent.number == 0, "others": others})

    def _send_start(self, agent: AgentConnection, address: str, port: int, *, joins: bool = False) -> None:
        """Has the ranks of a host started. ``joins``: they begin when they are taken into the run, which is under
        way."""
        number = agent.number
        agent.send({
            "kind": "start", "first": sum(self._counts[:number]), "count": self._counts[number],
            "size": sum(self._counts), "address": address, "port": port, "threads": self._threads[number],
            "run": self._run, "environment": {name: os.environ[name] for name in TRAVELS if name in os.environ},
            "path": list(self._shipment.path), "directory": os.getcwd(),
            "replaceable": self._replaceable, "several": len(self._counts) > 1, "joins": joins,
        })  # fmt: skip
        for data in (self._secret, self._shipment.code, self._shipment.payload):
            agent.send(data)

    def _try_to_meet(self, place: Message) -> None:
        """Has the other hosts try whether they reach the first. Raises ApportionError where one does not: its ranks
        would wait for minutes."""
        others = self._agents[1:]
        for agent in others:
            agent.send({"kind": "reach", "address": place["address"], "port": place["port"]})
        answers = self._answers("reached", READY_SECONDS, "has not said whether it reaches the first host", others)
        for agent, answer in zip(others, answers, strict=True):
            if answer["why"] is not None:
                raise ApportionError(
                    f"host {agent.host} cannot connect to host {self._agents[0].host} at {place['address']}, where the "
                    f"ranks meet at a free port ({answer['why']}): let the hosts connect to each other (is there a "
                    "firewall?), or name a host first that all others reach"
                )

    def _answers(self, kind: str, seconds: float, late: str, agents: Sequence[AgentConnection]) -> list[Message]:
        """Returns the answers of this kind of some hosts. Raises ApportionError where a host ends, refuses, or is
        late."""
        found: dict[int, Message] = {}
        wanted = [agent.number for agent in agents]
        allowed = Allowance(seconds)
        while len(found) < len(wanted):
            news = self._next_message(min(LOOK_SECONDS, allowed.left))
            if news is not None:
                number, message = news
                self._refuse_ended(number, message)
                if isinstance(message, dict) and message["kind"] == kind:
                    found[number] = message
            if allowed.left <= 0 and len(found) < len(wanted):
                number = next(n for n in wanted if n not in found)
                raise ApportionError(f"host {self._agents[number].host} {late} for {seconds:.0f} s: is it overloaded?")
        return [found[number] for number in wanted]

    def _next_message(self, seconds: float) -> News | None:
        with contextlib.suppress(queue.Empty):
            return self._news.get(timeout=max(0.0, seconds))
        return None

    def _refuse_ended(self, number: int, message: Message | bytes | None) -> None:
        """Raises ApportionError where the agent has ended, or cannot do what it must."""
        agent = self._agents[number]
        if message is None:
            raise (WorkerFailed if agent.is_up else ApportionError)(agent.why_ended())
        if isinstance(message, dict) and message["kind"] == "refused":
            raise ApportionError(f"host {agent.host}: {message['why']}")

    # While the ranks run

    def _make_pool(self, policy: Policy, *, survives: bool = False) -> HostsPool:
        """Returns the ranks, once they were started. ``survives``: those that are left go on after a loss."""
        if not self._replaceable:
            policy = replace(policy, host_grace=LONGEST_GRACE)
        return HostsPool(
            self._agents, self._counts, self._news, policy, replaceable=self._replaceable, survives=survives
        )

    def _print(self, rank: int, message: Message) -> None:
        prefix = f"{message['host']}, rank {rank}: " if sum(self._counts) > 1 else ""
        sys.stderr.write("".join(f"{prefix}{line}\n" for line in message["lines"]))
        sys.stderr.flush()

    # The end

    def _close(self) -> None:
        """Ends all agents, and waits until they are gone."""
        for agent in self._agents:
            agent.end()
        allowed = Allowance(END_SECONDS)
        for agent in self._agents:
            agent.wait(max(0.1, allowed.left))
        for agent in self._agents:
            agent.close()
        self._launcher.release(self._hosts)
