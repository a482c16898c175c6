"""A run on several hosts seen from the driver: passes on what the agents tell, and brings the run to its end."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from apportion.core.event import Event, event_after
from apportion.errors import ApportionError, CheckpointError, WorkerFailed
from apportion.runtime.hosts.frames import FrameError, Message
from apportion.runtime.hosts.host_failures import at_host, host_of
from apportion.runtime.hosts.run_copy import RunCopy, mark_of
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, Shipment, StartedHosts
from apportion.runtime.launch.ssh import Ssh
from apportion.runtime.supervisor.decisions import Finish, GoOn, Stop, failure
from apportion.runtime.supervisor.interrupts import Interrupts
from apportion.runtime.supervisor.run import interrupted_text, resume_command
from apportion.runtime.supervisor.watchdog import Allowance
from apportion.runtime.worker.job import Job

SAVE_SECONDS = 5.0
"""The seconds that the step under way and its checkpoint may take after Ctrl-C."""
STOP_SECONDS = 120.0
"""The seconds that they may take after ``break``."""
COPY_SECONDS = 60.0
"""The seconds that a host may take to send the next piece of the run directory."""


class HostsRun(StartedHosts):
    """One run of a job on several hosts. ``chooses``: the ranks choose the strategy, which is not the job's then."""

    def __init__(self, job: Job, launcher: Ssh, shipment: Shipment, *, chooses: bool = False) -> None:
        super().__init__(launcher, shipment)
        self._job, self._chooses = job, chooses
        self._began = self._last_happened
        self._last: Event | None = None
        self._finished: Event | None = None
        """The ``end`` event that rank 0 has sent."""
        self._end: Event | None = None
        """The event that the run ends with, once it is known."""
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
            self._copy_run()
            self._end = self._finished
            self._interrupts.outside = True
            yield self._end
            self._interrupts.outside = False

    # The run

    def _listen(self) -> Iterator[Event]:
        """Yields events until every rank has finished."""
        pause: float = LOOK_SECONDS
        allowed = self._allowances()
        while True:
            news = self._next(pause)
            try:
                event = self._take(*news) if news is not None else None
                self._refuse_silent(allowed, news)
            except WorkerFailed as error:  # the host is lost
                yield self._own_event("fault", rank=None, cause=str(error), traceback=None, action="stops")
                raise
            if event is not None:
                yield event
            action = self._action()
            if isinstance(action, Finish):
                self._hear_out(range(sum(self._counts)))
                return
            if isinstance(action, Stop):
                self._hear_out([action.rank])
                yield from self._fail(action)
            pause = LOOK_SECONDS
            if isinstance(action, GoOn) and action.seconds is not None:
                pause = min(pause, action.seconds)

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
        self._note(message, self._last.step if self._last is not None else 0)
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
            action = self._action()
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
