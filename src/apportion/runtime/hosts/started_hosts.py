"""Several hosts as the driver sees them: starts an agent on each, has it start its ranks, hears them, and ends them.

What is done with them, a run or a verb that returns a value, is a class of its own (``hosts_run``, ``hosts_verb``).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from apportion.core.fast_paths import VARIABLE as PLAIN_PATHS
from apportion.errors import ApportionError, WorkerFailed
from apportion.runtime.hosts.agent_connection import AgentConnection, News
from apportion.runtime.hosts.frames import Message
from apportion.runtime.hosts.host_facts import overload, ranks_of, refuse_unlike, versions
from apportion.runtime.hosts.host_failures import worker_event
from apportion.runtime.launch.ssh import Ssh
from apportion.runtime.supervisor.decisions import Action, next_action
from apportion.runtime.supervisor.failures import WorkerEvent, WorkerExited
from apportion.runtime.supervisor.watchdog import Allowance

READY_SECONDS = 30.0
"""The seconds that an agent may take to speak: ssh itself gives up earlier where nobody answers."""
SILENT_SECONDS = 30.0
"""The seconds that an agent, which says every few that it is there, may say nothing."""
LOOK_SECONDS = 0.5
"""The seconds between two looks at whether Ctrl-C has come."""
END_SECONDS = 8.0
"""The seconds that agents may take to end their ranks and remove their folders."""
WORDS_SECONDS = 2.0
"""The seconds in which what ranks have printed still arrives after they have told how they ended."""
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

    def __init__(self, launcher: Ssh, shipment: Shipment) -> None:
        self._launcher, self._shipment = launcher, shipment
        self._hosts = launcher.parsed()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._agents: list[AgentConnection] = []
        self._counts: list[int] = []
        """The number of ranks of each host."""
        self._happened: list[WorkerEvent] = []
        self._last_happened = time.monotonic()
        self._failed = False

    # The beginning

    def _start_agents(self) -> None:
        """Starts the agents, while Ctrl-C is held back: no agent may be started and not known."""
        for number, host in enumerate(self._hosts):
            process = self._launcher.start(host)
            self._agents.append(AgentConnection(number, host.destination, process, self._news))

    def _begin(self) -> None:
        """Hears where everything is, compares, and has the ranks started."""
        facts = self._answers("here", READY_SECONDS, "has not answered", self._agents)
        told = [(agent.host, fact) for agent, fact in zip(self._agents, facts, strict=True)]
        refuse_unlike(versions(), told, self._launcher.device)
        wanted = [host.workers for host in self._hosts]
        self._counts = [ranks_of(f, w, self._launcher.device) for f, w in zip(facts, wanted, strict=True)]
        threads = [self._launcher.threads_each(f["cores"], n) for f, n in zip(facts, self._counts, strict=True)]
        for (name, fact), count, each in zip(told, self._counts, threads, strict=True):
            if (said := overload(name, fact, count, each + self._launcher.loaders)) is not None:
                warnings.warn(said, stacklevel=2)
        others = [str(fact["address"]) for fact in facts[1:]]
        for agent in self._agents:
            agent.send({"kind": "prepare", "first": agent.number == 0, "others": others})
        (place,) = self._answers("place", READY_SECONDS, "has not said where the ranks meet", self._agents[:1])
        self._try_to_meet(place)
        secret, run = secrets.token_hex(32).encode(), secrets.token_hex(8)
        for agent, count, each in zip(self._agents, self._counts, threads, strict=True):
            agent.send({
                "kind": "start", "first": sum(self._counts[: agent.number]), "count": count, "size": sum(self._counts),
                "address": place["address"], "port": place["port"], "threads": each, "run": run,
                "environment": {name: os.environ[name] for name in TRAVELS if name in os.environ},
                "path": list(self._shipment.path), "directory": os.getcwd(),
            })  # fmt: skip
            for data in (secret, self._shipment.code, self._shipment.payload):
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
            news = self._next(min(LOOK_SECONDS, allowed.left))
            if news is not None:
                number, message = news
                self._refuse_ended(number, message)
                if isinstance(message, dict) and message["kind"] == kind:
                    found[number] = message
            if allowed.left <= 0 and len(found) < len(wanted):
                number = next(n for n in wanted if n not in found)
                raise ApportionError(f"host {self._agents[number].host} {late} for {seconds:.0f} s: is it overloaded?")
        return [found[number] for number in wanted]

    def _next(self, seconds: float) -> News | None:
        with contextlib.suppress(queue.Empty):
            return self._news.get(timeout=max(0.0, seconds))
        return None

    def _refuse_ended(self, number: int, message: Message | bytes | None) -> None:
        """Raises ApportionError where the agent has ended, or cannot do what it must."""
        agent = self._agents[number]
        if message is None:
            self._failed = True
            raise (WorkerFailed if agent.is_up else ApportionError)(agent.why_ended())
        if isinstance(message, dict) and message["kind"] == "refused":
            self._failed = True
            raise ApportionError(f"host {agent.host}: {message['why']}")

    # While the ranks run

    def _allowances(self) -> list[Allowance]:
        """Returns how long each agent may say nothing, from now on."""
        return [Allowance(SILENT_SECONDS) for _ in self._agents]

    def _refuse_silent(self, allowed: list[Allowance], news: News | None) -> None:
        """Raises WorkerFailed where an agent says nothing any more. ``news``: what was heard last, which gives the
        agent that has said it its time anew."""
        if news is not None:
            allowed[news[0]] = Allowance(SILENT_SECONDS)
        for agent, allowance in zip(self._agents, allowed, strict=True):
            if allowance.left <= 0:
                raise WorkerFailed(
                    f"host {agent.host}: its agent has said nothing for {SILENT_SECONDS:.0f} s: it was stopped, or the "
                    "host has no time or no memory left; --resume goes on"
                )

    def _note(self, message: Message, step: int) -> None:
        """Notes what has happened to a rank. ``step``: the number of updates that were seen made."""
        happened = worker_event(message, step)
        if happened is not None:
            self._happened.append(happened)
            self._last_happened = time.monotonic()

    def _action(self) -> Action:
        """Decides what to do about all that has happened to the ranks so far."""
        return next_action(self._happened, sum(self._counts), time.monotonic() - self._last_happened)

    def _hear_out(self, ranks: Iterable[int]) -> None:
        """Prints what these ranks have printed, until they have ended: their output comes by another way than what they
        tell."""
        left, allowed = set(ranks), Allowance(WORDS_SECONDS)
        while left := left - {h.rank for h in self._happened if isinstance(h, WorkerExited)}:
            news = self._next(min(LOOK_SECONDS, allowed.left))
            if allowed.left <= 0 or (news is not None and news[1] is None):
                return
            if news is not None:
                self._take(*news)

    def _take(self, number: int, message: Message | bytes | None) -> object:
        """Takes what an agent tells. Raises ApportionError where the agent has ended."""
        raise NotImplementedError

    def _print(self, number: int, message: Message) -> None:
        prefix = f"{self._agents[number].host}, rank {message['rank']}: " if sum(self._counts) > 1 else ""
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
