"""A run on several hosts seen from the driver: passes on what the ranks tell, and brings the run to its end."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from apportion.core.event import Event, event_after
from apportion.errors import ToldToEnd
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.hosts.agent_connection import AgentConnection
from apportion.runtime.hosts.frames import Message
from apportion.runtime.hosts.host_failures import at_host
from apportion.runtime.hosts.recorded_hosts import RecordedHosts
from apportion.runtime.hosts.recruiting import Recruiter
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, WORDS_SECONDS, Shipment
from apportion.runtime.notice import explain, requeue_job
from apportion.runtime.supervisor.decisions import Finish, Stop, failure
from apportion.runtime.supervisor.failures import Notice
from apportion.runtime.supervisor.interrupts import Interrupts
from apportion.runtime.supervisor.recovery import Fault, RecoveryLoop, Said
from apportion.runtime.supervisor.recovery import News as PoolNews
from apportion.runtime.supervisor.run import cause_of, interrupted_text, quoted, resume_command
from apportion.runtime.supervisor.watchdog import Allowance
from apportion.runtime.worker.job import Job

SAVE_SECONDS = 5.0
"""The seconds that the step under way and its checkpoint may take after Ctrl-C, or after the notice to end."""
STOP_SECONDS = 120.0
"""The seconds that they may take after ``break``."""


class HostsRun(RecordedHosts):
    """One run of a job on several hosts. ``chooses``: the ranks choose the strategy, which is not the job's then."""

    def __init__(self, job: Job, launcher: HostsLauncher, shipment: Shipment, *, chooses: bool = False) -> None:
        super().__init__(job, launcher, shipment)
        self._chooses = chooses
        self._began = time.monotonic()
        self._recruiter: Recruiter | None = None
        self._finished: Event | None = None
        """The ``end`` event that rank 0 has sent."""
        self._end: Event | None = None
        """The event that the run ends with, once it is known."""
        self._saved = False
        """True once a checkpoint was told."""
        self._told_to_end = False
        """True once the notice to end has cut the run short."""
        self._remarks: list[str] = []
        """The warnings that have not been reported as events yet."""
        self._remarked: set[str] = set()
        self._interrupts = Interrupts(self._interrupted_outside)

    def events(self) -> Generator[Event, None, None]:
        """Yields everything that happens, as it happens. Closing the generator (``break``), Ctrl-C, and the notice to
        end, which may be an agent's, checkpoint and stop every rank at one step; the last two give up after
        SAVE_SECONDS. Raises ToldToEnd after the notice, WorkerFailed, CheckpointError,
        RanksDiffer, ApportionError where a host cannot take part, or ValueError for the user's mistakes."""
        try:
            self._interrupts.install()
            yield from self._guarded()
        except (KeyboardInterrupt, ToldToEnd) as interrupt:
            if self._end is None and not self._failed:
                end = self._save_and_stop(interrupt)
                self._interrupts.restore()
                yield end
                explain(interrupt, self._interrupted_text(end, interrupt))
            raise
        except GeneratorExit:
            self._leave()
            raise
        finally:
            self._interrupts.hold()
            self._close()
            self._interrupts.restore()
            if self._told_to_end:
                requeue_job(self._job.policy)

    def _guarded(self) -> Iterator[Event]:
        """Yields the events, and notes the place of an interrupt: inside the run, or in the body of the user's loop."""
        self._interrupts.hold()  # no agent may be started and not known
        self._start_agents()
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
            self._record_rest()
            self._copy_run()
            self._end = self._finished
            self._interrupts.outside = True
            yield self._end
            self._interrupts.outside = False

    # The run

    def _listen(self) -> Iterator[Event]:
        """Yields events until every rank has finished."""
        survives = self._replaceable and self._job.strategy.recovers_across_hosts
        self._pool = self._make_pool(self._job.policy, survives=survives)
        self._recovery = RecoveryLoop(self._pool, spares=False)
        if self._replaceable and len(self._hosts) > 1:
            self._recruiter = Recruiter(self._launcher, self._hosts, self._pool, self._begin_again)
        while True:
            news = self._next_news(LOOK_SECONDS)
            if isinstance(news, Said) and news.message["kind"] == "notice":
                raise ToldToEnd(news.message["signal"], news.message["cause"])
            yield from self._events_of(news)
            if isinstance(news, Finish):
                return
            if isinstance(news, Stop):
                yield from self._fail(news)
            if isinstance(news, Exception):
                yield self._last_fault(rank=0, cause=str(news), traceback=None, action="stops")
                raise news

    def _begin_again(self, agent: AgentConnection) -> None:
        """Tells an agent what the one before it was told, of a run that is under way."""
        self._send_prepare(agent, self._addresses)
        self._send_start(agent, self._addresses[0], 0, joins=True)

    def _next_news(self, seconds: float) -> PoolNews | None:
        """Returns the next news of the ranks, or None where none comes within this time; notes whether it is the
        last."""
        assert self._recovery is not None
        news = self._recovery.news(seconds)
        self._failed = self._failed or isinstance(news, Stop | Exception)
        return news

    def _events_of(self, news: PoolNews | None) -> Iterator[Event]:
        """Yields news as events, where they are some for the user; what rank 0 does not see is sent to it, which writes
        the record. The ``end`` is kept: it comes last."""
        if (order := self._record.again()) is not None and self._pool is not None:
            self._pool.send(order)
        while self._remarks and self._last is not None:  # the run has begun, so that there is a record
            yield self._fault(0, self._remarks.pop(0), "goes on")
        if isinstance(news, Fault):
            yield self._fault(news.loss.rank, news.loss.cause, news.action)
        elif isinstance(news, Notice):
            yield self._fault(news.rank, news.cause, news.action)
        elif isinstance(news, Said):
            yield from self._said(news.rank, news.message)

    def _said(self, rank: int, message: Message) -> Iterator[Event]:
        kind = message["kind"]
        if kind == "output":
            self._print(rank, message)
        elif kind == "noted":
            self._record.written(message["numbers"])
        elif kind == "warned":
            self._warn(f"rank {rank} on host {message['host']}: {message['text']}")
        if kind != "event":
            return
        event = Event(**message["event"])
        if event.kind not in ("speed", "rollouts"):
            self._last = event
        elif rank != 0:  # rank 0 sees its own alone
            self._note(event)
        self._saved = self._saved or event.kind == "checkpoint"
        if event.kind == "end":
            self._finished = self._finished or event
            return
        if event.kind == "start":
            yield from self._proved(event)
        yield event

    def _proved(self, start: Event) -> Iterator[Event]:
        """Yields what the ranks have proved together, which their start event holds."""
        proof = start.data.get("proof")
        if proof is not None and not proof.get("remembered"):
            yield replace(start, kind="proof", data=proof)

    def _warn(self, text: str) -> None:
        """Has a warning reported, once: as an event of the run, which is recorded."""
        if text not in self._remarked:
            self._remarked.add(text)
            self._remarks.append(text)

    def _fail(self, stop: Stop) -> Iterator[Event]:
        """Yields the fault, and raises it. Raises WorkerFailed or what the cause is otherwise."""
        assert self._pool is not None
        assert self._recovery is not None
        host = stop.host or self._pool.host_of(stop.rank)
        self._recovery.close()
        for rank, message in self._pool.hear_out(stop.rank, WORDS_SECONDS):  # their output comes by another way
            yield from self._events_of(Said(rank, message))
        is_saved = self._saved or bool(self._job.resume)
        stop = at_host(stop, host, str(self._shipment.root), is_saved=is_saved)
        yield self._last_fault(rank=stop.rank, cause=stop.cause, traceback=stop.traceback, action="stops")
        raise failure(stop)

    def _last_fault(self, **data: Any) -> Event:
        """Returns the fault that ends the run, once it is recorded and everything has been ended."""
        event = self._own_event("fault", **data)
        if self._last is not None:
            self._record.add(event)
        self._record_rest()
        self._copy_record()
        self._close()
        return event

    def _fault(self, rank: int, cause: str, action: str) -> Event:
        event = self._own_event("fault", rank=rank, cause=cause, traceback=None, action=action)
        self._note(event)
        return event

    def _own_event(self, kind: Any, **data: Any) -> Event:
        return event_after(self._last, kind, time.monotonic() - self._began, data)

    # The end

    def _interrupted_outside(self, interrupt: BaseException) -> str:
        """Saves and stops after an interrupt in the body of the loop, which may come back here late or never. Returns
        what to tell."""
        if self._failed:
            return f"{cause_of(interrupt)}; the run had stopped"
        if self._end is None:
            self._save_and_stop(interrupt)
        assert self._end is not None
        return self._interrupted_text(self._end, interrupt)

    def _interrupted_text(self, end: Event, interrupt: BaseException) -> str:
        where = "" if self._pool is None else f"\nit is on host {self._pool.host_of(0)}, in {self._place}"
        return interrupted_text(end, cause_of(interrupt)) + (where if end.data["resume"] is not None else "")

    def _resume(self) -> str | None:
        """Returns how to go on, as it is typed."""
        text = resume_command(self._job)
        if text is None or self._chooses or not text.startswith("apportion "):
            return text
        unproved = "" if self._job.prove else " --no-check"
        return f"{text} --strategy {quoted(str(self._job.strategy))}{unproved}"

    def _save_and_stop(self, interrupt: BaseException) -> Event:
        """Stops all ranks at one step, which saves it, and returns the ``end`` event. A second signal cuts it short,
        and so does the time."""
        why: str | None = "the first step had not begun"
        if self._last is not None:
            notice = interrupt.number if isinstance(interrupt, ToldToEnd) else 0
            why = self._stop(SAVE_SECONDS, lambda: self._interrupts.again, notice)
        if self._finished is not None and self._finished.data["reason"] == "finished":
            self._end = self._finished
            self._record_rest()
            self._close()
            return self._end
        self._told_to_end = isinstance(interrupt, ToldToEnd)
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
        if stopped is not None:
            self._end = replace(self._end, step=stopped.step, epoch=stopped.epoch)
        elif self._last is not None:
            self._record.add(self._end)
        self._record_rest()
        self.is_late = self.is_late and not self._told_to_end  # a report takes more time than there may be
        self._close()
        return self._end

    def _stop(self, seconds: float, cut: Callable[[], bool], notice: int = 0) -> str | None:
        """Has all ranks stop at one step; returns why they did not, or None where they did. What they tell meanwhile is
        written down by rank 0. ``cut``: whether to wait no longer; ``notice``: the signal that the run was told to end
        by, if any."""
        if self._failed or self._recovery is None:
            return "the run has ended"
        assert self._pool is not None
        self._pool.send({"kind": "stop", "notice": notice})
        allowed = Allowance(seconds)
        while allowed.left > 0 and not cut():
            news = self._next_news(0.1)
            deque(self._events_of(news), maxlen=0)
            if isinstance(news, Finish):
                return None
            if isinstance(news, Stop):
                return news.cause
            if isinstance(news, Exception):
                return str(news)
        return "interrupted again" if cut() else f"it took longer than {seconds:g} s"

    def _leave(self) -> None:
        """Stops all ranks at one step, after the loop over the events was left."""
        self._interrupts.hold()
        if self._end is not None or self._failed:
            return
        why = self._stop(STOP_SECONDS, lambda: self._interrupts.pending)
        if why is not None:
            warnings.warn(f"the run was left, and could not be saved as it was: {why}", stacklevel=2)
            self._record_rest()
        else:
            self._record_rest()
            self._copy_run()

    def _close(self) -> None:
        for text in self._remarks if self._last is None else ():  # of a run that has not begun, and has no record
            warnings.warn(text, stacklevel=2)
        self._remarks.clear()
        if self._recovery is not None:
            self._recovery.close()
        if self._recruiter is not None:
            self._recruiter.close()
            self._agents += self._recruiter.agents
            self._recruiter.agents = []
        super()._close()
