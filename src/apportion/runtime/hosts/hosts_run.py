"""A run on several hosts seen from the driver: starts an agent on each, passes on what they tell, and ends them."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apportion.core.event import Event, event_after
from apportion.core.fast_paths import VARIABLE as PLAIN_PATHS
from apportion.errors import ApportionError, CheckpointError, WorkerFailed
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.hosts.agent_connection import AgentConnection, News
from apportion.runtime.hosts.frames import FrameError, Message
from apportion.runtime.hosts.host_facts import overload, ranks_of, refuse_unlike, versions
from apportion.runtime.hosts.host_failures import at_host, host_of, worker_event
from apportion.runtime.hosts.run_copy import RunCopy, mark_of
from apportion.runtime.supervisor.decisions import Finish, GoOn, Stop, failure, next_action
from apportion.runtime.supervisor.failures import WorkerEvent, WorkerExited
from apportion.runtime.supervisor.interrupts import Interrupts
from apportion.runtime.supervisor.run import interrupted_text, resume_command
from apportion.runtime.supervisor.watchdog import Allowance
from apportion.runtime.worker.job import Job

READY_SECONDS = 30.0
"""The seconds that an agent may take to speak: a launcher itself gives up earlier where nobody answers."""
SILENT_SECONDS = 30.0
"""The seconds that an agent, which says every few that it is there, may say nothing."""
LOOK_SECONDS = 0.5
"""The seconds between two looks at whether Ctrl-C has come."""
SAVE_SECONDS = 5.0
"""The seconds that the step under way and its checkpoint may take after Ctrl-C."""
STOP_SECONDS = 120.0
"""The seconds that they may take after ``break``."""
END_SECONDS = 8.0
"""The seconds that agents may take to end their ranks and remove their folders."""
WORDS_SECONDS = 2.0
"""The seconds in which what ranks have printed still arrives after they have told how they ended."""
COPY_SECONDS = 60.0
"""The seconds that a host may take to send the next piece of the run directory."""
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


class HostsRun:
    """One run of a job on several hosts. ``chooses``: the ranks choose the strategy, which is not the job's then."""

    def __init__(self, job: Job, launcher: HostsLauncher, shipment: Shipment, *, chooses: bool = False) -> None:
        self._job, self._launcher, self._shipment, self._chooses = job, launcher, shipment, chooses
        self._hosts = launcher.parsed()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._agents: list[AgentConnection] = []
        self._counts: list[int] = []
        """The number of ranks of each host."""
        self._happened: list[WorkerEvent] = []
        self._last_happened = self._began = time.monotonic()
        self._last: Event | None = None
        self._finished: Event | None = None
        """The ``end`` event that rank 0 has sent."""
        self._end: Event | None = None
        """The event that the run ends with, once it is known."""
        self._failed = False
        self._place = str(job.run_dir)
        """The run directory, as its host calls it."""
        self._saved = False
        """True once a checkpoint was told."""
        self._interrupts = Interrupts(self._interrupted_outside)

    def events(self) -> Generator[Event, None, None]:
        """Yields everything that happens, as it happens. Closing the generator (``break``) and Ctrl-C checkpoint and
        stop every rank at one step; Ctrl-C gives up after SAVE_SECONDS. Raises WorkerFailed, CheckpointError,
        RanksDiffer, ApportionError where a host cannot take part, or ValueError for the user's mistakes."""
        try:
            self._interrupts.install()
            yield from self._guarded()
        except KeyboardInterrupt as interrupt:
            if self._end is None and not self._failed:
                end = self._save_and_stop()
                self._interrupts.restore()
                yield end
                interrupt.add_note(self._interrupted_text(end))
            raise
        except GeneratorExit:
            self._leave()
            raise
        finally:
            self._interrupts.hold()
            self._close()
            self._interrupts.restore()

    def _guarded(self) -> Iterator[Event]:
        """Yields the events, and notes the place of an interrupt: inside the run, or in the body of the user's loop."""
        self._interrupts.hold()  # no agent may be started and not known
        for number, host in enumerate(self._hosts):
            process = self._launcher.start(host)
            self._agents.append(AgentConnection(number, host.destination, self._launcher, process, self._news))
        self._interrupts.release()
        self._begin()
        for event in self._listen():
            self._interrupts.outside = True
            yield event
            self._interrupts.outside = False
            if self._end is not None:  # an interrupt that the body of the loop has caught
                yield self._end
                return
        if self._finished is not None:
            self._copy_run()
            self._end = self._finished
            self._interrupts.outside = True
            yield self._end
            self._interrupts.outside = False

    # The beginning

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

    # The run

    def _listen(self) -> Iterator[Event]:
        """Yields events until every rank has finished."""
        pause: float = LOOK_SECONDS
        allowed = [Allowance(SILENT_SECONDS) for _ in self._agents]
        while True:
            news = self._next(pause)
            try:
                event = self._take(*news) if news is not None else None
                if news is not None:
                    allowed[news[0]] = Allowance(SILENT_SECONDS)
                self._refuse_silent([allowance.left for allowance in allowed])
            except WorkerFailed as error:  # the host is lost
                yield self._own_event("fault", rank=None, cause=str(error), traceback=None, action="stops")
                raise
            if event is not None:
                yield event
            action = next_action(self._happened, sum(self._counts), time.monotonic() - self._last_happened)
            if isinstance(action, Finish):
                self._hear_out(range(sum(self._counts)))
                return
            if isinstance(action, Stop):
                self._hear_out([action.rank])
                yield from self._fail(action)
            pause = LOOK_SECONDS
            if isinstance(action, GoOn) and action.seconds is not None:
                pause = min(pause, action.seconds)

    def _refuse_silent(self, left: Sequence[float]) -> None:
        """Raises WorkerFailed where an agent says nothing any more. ``left``: the seconds that each may go on so."""
        for agent, seconds in zip(self._agents, left, strict=True):
            if seconds <= 0:
                raise WorkerFailed(
                    f"host {agent.host}: its agent has said nothing for {SILENT_SECONDS:.0f} s: it was stopped, or the "
                    "host has no time or no memory left; --resume goes on"
                )

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

    def _fail(self, stop: Stop) -> Iterator[Event]:
        """Yields the fault, and raises it. Raises WorkerFailed or what the cause is otherwise."""
        self._failed = True
        host = self._agents[host_of(stop.rank, self._counts)].host
        stop = at_host(stop, host, str(self._shipment.root))
        self._close()
        data = {"rank": stop.rank, "cause": stop.cause, "traceback": stop.traceback, "action": "stops"}
        yield self._own_event("fault", **data)
        raise failure(stop)

    def _take(self, number: int, message: Message | bytes | None) -> Event | None:
        """Takes what an agent tells, and returns it where it is an event for the user. Raises ApportionError where the
        agent has ended."""
        self._refuse_ended(number, message)
        if not isinstance(message, dict):
            return None
        if message["kind"] == "started" and number == 0:
            self._place = str(Path(message["directory"], str(self._job.run_dir)))
        if message["kind"] == "output":
            self._print(number, message)
        if message["kind"] == "event":
            return self._told(Event(**message["event"]))
        happened = worker_event(message, self._last.step if self._last is not None else 0)
        if happened is not None:
            self._happened.append(happened)
            self._last_happened = time.monotonic()
        return None

    def _told(self, event: Event) -> Event | None:
        """Returns an event for the user. The ``end`` is kept: it comes last."""
        if event.kind != "speed":
            self._last = event
        self._saved = self._saved or event.kind == "checkpoint"
        if event.kind == "end":
            self._finished = event
            return None
        return event

    def _print(self, number: int, message: Message) -> None:
        prefix = f"{self._agents[number].host}, rank {message['rank']}: " if sum(self._counts) > 1 else ""
        sys.stderr.write("".join(f"{prefix}{line}\n" for line in message["lines"]))
        sys.stderr.flush()

    def _own_event(self, kind: Any, **data: Any) -> Event:
        return event_after(self._last, kind, time.monotonic() - self._began, data)

    # The end

    def _copy_run(self) -> None:
        """Copies the run directory from rank 0's host, unless both hosts see the same one."""
        assert self._job.run_dir is not None
        local, agent = Path(self._job.run_dir), self._agents[0]
        agent.send({"kind": "fetch", "run_dir": self._job.run_dir, "known": mark_of(local)})
        copy, allowed = RunCopy(local), Allowance(COPY_SECONDS)
        try:
            while allowed.left > 0:
                news = self._next(LOOK_SECONDS)
                if news is None or news[0] != 0:
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
                    allowed = Allowance(COPY_SECONDS)
            raise CheckpointError(f"nothing came for {COPY_SECONDS:.0f} s")
        except (ApportionError, FrameError) as error:
            warnings.warn(
                f"the run is whole on host {agent.host}, in {self._place}, and is not copied here: {error}",
                stacklevel=2,
            )
        finally:
            copy.drop()

    def _interrupted_outside(self) -> str:
        """Saves and stops after Ctrl-C in the body of the loop, which may come back here late or never. Returns what to
        tell."""
        if self._failed:
            return "interrupted; the run had stopped"
        return self._interrupted_text(self._end if self._end is not None else self._save_and_stop())

    def _interrupted_text(self, end: Event) -> str:
        where = f"\nit is on host {self._hosts[0].destination}, in {self._place}"
        return interrupted_text(end) + (where if end.data["resume"] is not None else "")

    def _resume(self) -> str | None:
        """Returns how to go on, as it is typed."""
        text = resume_command(self._job)
        if text is None or self._chooses or not text.startswith("apportion "):
            return text
        return f"{text} --strategy {shlex.quote(str(self._job.strategy))}"

    def _save_and_stop(self) -> Event:
        """Stops all ranks at one step, which saves it, and returns the ``end`` event. A second Ctrl-C cuts it short,
        and so does the time."""
        why: str | None = "the first step had not begun"
        if self._last is not None:
            why = self._stop(SAVE_SECONDS, lambda: self._interrupts.again)
        self._close()
        if self._finished is not None and self._finished.data["reason"] == "finished":
            self._end = self._finished
            return self._end
        stopped = self._finished
        self._end = self._own_event(
            "end",
            reason="interrupted",
            examples_per_second=0.0,
            metrics={} if stopped is None else dict(stopped.data["metrics"]),
            run_dir=self._job.run_dir,
            resume=self._resume() if stopped is not None or self._saved else None,
            why=why,
        )
        return self._end if stopped is None else replace(self._end, step=stopped.step, epoch=stopped.epoch)

    def _stop(self, seconds: float, cut: Callable[[], bool]) -> str | None:
        """Has all ranks stop at one step; returns why they did not, or None where they did. What they tell meanwhile is
        written down by rank 0. ``cut``: whether to wait no longer."""
        if self._failed or not self._agents:
            return "the run has ended"
        self._agents[0].send({"kind": "stop"})
        allowed = Allowance(seconds)
        while allowed.left > 0 and not cut():
            try:
                news = self._next(0.1)
                if news is not None:
                    self._take(*news)
            except ApportionError as error:
                return str(error)
            action = next_action(self._happened, sum(self._counts), time.monotonic() - self._last_happened)
            if isinstance(action, Finish):
                return None
            if isinstance(action, Stop):
                return action.cause
        return "interrupted again" if cut() else f"it took longer than {seconds:g} s"

    def _leave(self) -> None:
        """Stops all ranks at one step, after the loop over the events was left."""
        self._interrupts.hold()
        if self._end is not None or self._failed:
            return
        why = self._stop(STOP_SECONDS, lambda: self._interrupts.pending)
        if why is not None:
            warnings.warn(f"the run was left, and could not be saved as it was: {why}", stacklevel=2)
        else:
            self._copy_run()

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
