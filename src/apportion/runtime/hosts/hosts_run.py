"""A run on several hosts seen from the driver: the ranks' agents are here what a worker's process is on one host, and
rank 0, on the first host, writes the record and the run directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from apportion.core.event import Event
from apportion.errors import ToldToEnd
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.hosts.host_failures import at_host
from apportion.runtime.hosts.recorded_hosts import RecordedHosts
from apportion.runtime.hosts.started_hosts import WORDS_SECONDS, Shipment
from apportion.runtime.notice import requeue_job
from apportion.runtime.supervisor.failures import Finish, Stop, failure
from apportion.runtime.supervisor.recovery import News, RankMessage, RecoveryLoop
from apportion.runtime.supervisor.run import STOP_SECONDS, TrainingRun, failed_text, quoted, resume_command
from apportion.runtime.worker.job import Job

SAVE_SECONDS = 5.0
"""The seconds that the step under way and its checkpoint may take after Ctrl-C, or after the notice to end."""


@final
class HostsRun(TrainingRun):
    """One run of a job on several hosts. ``chooses``: the ranks choose the strategy, which is not the job's then.

    Ctrl-C and the notice to end, which may also be an agent's, stop every rank at one step as ``break`` does: only all
    ranks together have the state, and rank 0 cannot save alone.
    """

    def __init__(self, job: Job, launcher: HostsLauncher, shipment: Shipment, *, chooses: bool = False) -> None:
        super().__init__(job)
        self._chooses = chooses
        self._hosts = RecordedHosts(job, launcher, shipment)
        self._saved = False
        """True once a checkpoint was reported."""

    @property
    def is_late(self) -> bool:
        """True where something was recorded after rank 0 had drawn its report, and there is time for another one."""
        return self._hosts.is_late

    def events(self) -> Generator[Event, None, None]:
        """Yields everything that happens, as ``TrainingRun.events`` says."""
        try:
            yield from super().events()
        finally:
            if self.told_to_end:
                requeue_job(self._job.policy)

    def _open(self) -> None:
        self._interrupts.hold()  # no agent may be started and not known
        self._hosts.start_agents()
        self._interrupts.release()
        pool = self._hosts.begin_ranks()
        self._recovery = RecoveryLoop(pool, spares=False)
        self._hosts.recruit()

    def _close(self) -> None:
        if self._last is None:  # the run has not begun, and has no record that warnings could be events of
            self._hosts.warn_of_remarks()
        # The loop first: it reads the same queue as `close` and the copying of the run directory do.
        super()._close()
        self._hosts.close()

    # While the run goes on

    def _respond(self, news: News | None) -> Iterator[Event]:
        # The pool has had all ranks stop already, in its own thread: the body of the loop may have kept this one busy.
        if isinstance(news, RankMessage) and news.message["kind"] == "notice":
            raise ToldToEnd(news.message["signal"], news.message["cause"])
        return super()._respond(news)

    def _events_of(self, news: News | None) -> Iterator[Event]:
        """Yields news as events, where they are some for the user; what rank 0 does not see is sent to it, which writes
        the record."""
        self._hosts.record_again()
        while self._hosts.remarks and self._last is not None:  # the run has begun, so that there is a record
            yield self._fault(0, self._hosts.remarks.pop(0), "goes on")
        yield from super()._events_of(news)

    def _events_of_message(self, rank: int, message: Mapping[str, Any]) -> Iterator[Event]:
        self._hosts.take_message(rank, message)
        return super()._events_of_message(rank, message)

    def _take_event(self, rank: int, event: Event) -> Iterator[Event]:
        if event.kind in self.samples and rank != 0:  # rank 0 sees its own alone
            self._hosts.record(event)
        self._saved = self._saved or event.kind == "checkpoint"
        for taken in super()._take_event(rank, event):
            if taken.kind == "start":
                yield from _proved(taken)
            yield taken

    def _fault(self, rank: int, cause: str, action: str, traceback: str | None = None) -> Event:
        event = super()._fault(rank, cause, action, traceback)
        self._hosts.record(event)
        return event

    def _fail(self, news: Stop | Exception) -> Generator[Event, None, Exception]:
        if isinstance(news, Exception):
            yield self._last_fault(0, str(news))
            return news
        host = news.host or self._hosts.pool.host_of(news.rank)
        super()._close()  # the pool belongs to this thread from here on
        for rank, message in self._hosts.pool.hear_out(news.rank, WORDS_SECONDS):  # their output comes by another way
            yield from self._events_of(RankMessage(rank, message))
        is_saved = self._saved or bool(self._job.resume)
        stop = at_host(news, host, str(self._hosts.root), is_saved=is_saved)
        yield self._last_fault(stop.rank, stop.cause, stop.traceback)
        return failure(stop)

    def _last_fault(self, rank: int, cause: str, traceback: str | None = None) -> Event:
        """Returns the fault that ends the run, once it is recorded and everything has been ended."""
        event = super()._fault(rank, cause, "stops", traceback)
        if self._last is not None:
            self._hosts.record_at_end(event)  # rank 0 may be what was lost
        self._record_rest()
        if self._last is not None:
            self._hosts.copy_record()
        self._close()
        return event

    def _complete(self) -> None:
        self._record_rest()
        self._hosts.copy_run()

    def _record_rest(self) -> None:
        """Has the agent of rank 0's host write what rank 0 has not reported as written. What never began leaves no
        record."""
        super()._close()  # the agent's answer is read here, and not by the recovery loop
        if self._last is not None:
            self._hosts.record_rest()

    # Ctrl-C, and the notice to end

    def _interrupted_text(self, end: Event, interrupt: BaseException) -> str:
        where = (
            f"\nit is on {self._hosts.run_dir_place}"
            if end.data["resume"] is not None and self._hosts.has_ranks
            else ""
        )
        return super()._interrupted_text(end, interrupt) + where

    def _save(self, interrupt: BaseException | None) -> str | None:
        """Has all ranks stop at one step, which saves it."""
        if self._over is not None:
            return "the run has ended"
        notice = interrupt.number if isinstance(interrupt, ToldToEnd) else 0
        self._stop_together(SAVE_SECONDS, lambda: self._interrupts.again, notice)
        return self._why_unsaved(SAVE_SECONDS, cut=self._interrupts.again)

    def _why_unsaved(self, seconds: float, *, cut: bool) -> str | None:
        """Returns why the ranks have not stopped together, or None where they have. ``cut``: whether they were waited
        for no longer."""
        if isinstance(self._over, Finish):
            return None
        if self._over is not None:
            return failed_text(self._over)
        return "interrupted again" if cut else f"it took longer than {seconds:g} s"

    def _is_whole(self, finished: Event, why: str | None) -> bool:
        return bool(finished.data["reason"] == "finished")

    def _interrupted_end(self, why: str | None) -> Event:
        stopped = self._finished
        resume = self._resume() if stopped is not None or self._saved else None
        end = self._end_event(why, resume, {} if stopped is None else stopped.data["metrics"])
        if stopped is not None:  # rank 0 has recorded an end of its own
            return replace(end, step=stopped.step, epoch=stopped.epoch)
        if self._last is not None:
            self._hosts.record_at_end(end)
        return end

    def _resume(self) -> str | None:
        """Returns how to go on, as it is typed."""
        text = resume_command(self._job)
        if text is None or self._chooses or not text.startswith("apportion "):
            return text
        unproved = "" if self._job.prove else " --no-check"
        return f"{text} --strategy {quoted(str(self._job.strategy))}{unproved}"

    def _wind_up(self) -> None:
        # The record before the agents end: one of them writes it. The run directory stays on its host: copying it may
        # take longer than the sender of the signal waits.
        self._record_rest()
        if self.told_to_end:
            self._hosts.is_late = False  # a report takes more time than there may be
        super()._wind_up()

    # Leaving the loop by ``break``

    def _send_stop(self, notice: int) -> None:
        self._hosts.pool.send({"kind": "stop", "notice": notice})

    def _take_late(self, news: News | None) -> None:
        deque(self._events_of(news), maxlen=0)  # rank 0 writes these events down, and no other process may

    def _complete_left(self) -> None:
        self._record_rest()
        self._hosts.copy_run()

    def _give_up_left(self) -> None:
        self._warn_of_unsaved(str(self._why_unsaved(STOP_SECONDS, cut=self._interrupts.pending)))
        self._record_rest()


def _proved(start: Event) -> Iterator[Event]:
    """Yields what the ranks have proved together, which their start event holds."""
    proof = start.data.get("proof")
    if proof is not None and not proof.get("remembered"):
        yield replace(start, kind="proof", data=proof)
