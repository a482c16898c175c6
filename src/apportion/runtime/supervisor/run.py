"""A run seen from the driver: starts the workers, passes on what they report, and does what ``decisions`` decides."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

from apportion.core.event import Event, event_after
from apportion.core.policy import Policy
from apportion.errors import ToldToEnd
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.launch.local import Local
from apportion.runtime.notice import explain
from apportion.runtime.proof.proof import Settled
from apportion.runtime.supervisor.failures import Finish, Notice, Stop, failure
from apportion.runtime.supervisor.interrupts import Interrupts
from apportion.runtime.supervisor.recovery import Fault, News, RankMessage, RecoveryLoop
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Allowance
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job

SAVE_SECONDS = 3.5
"""The seconds that writing the last update may take after Ctrl-C, or after the notice to end."""
HURRY_SECONDS = 0.1
"""The seconds within which a second Ctrl-C is noticed while a run is saved."""
STOP_SECONDS = 120.0
"""The seconds that the step under way and its checkpoint may take after ``break``."""


class TrainingRun(ABC):
    """One run of a job, wherever its ranks are. A subclass says how the ranks are started, saved and ended; when that
    is done is said here alone:

    ::

        _open          the ranks are started, and a RecoveryLoop watches their pool from a thread of its own
        _listen        news of that loop become events, until the last news: Finish, Stop or an exception
        _save_and_stop after Ctrl-C or the notice to end, within a few seconds
        _stop_after_break         after ``break``, which has more time: all ranks stop at one step
        _close         always, and last; it may be called more than once

    Everything here runs in the thread that iterates over the events, the handlers of signals among it, where that is
    the main thread.
    """

    samples: ClassVar[frozenset[str]] = frozenset({"speed", "rollouts"})
    """The kinds of events that each rank sends of itself: the driver's own events take no step number from them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._recovery: RecoveryLoop | None = None
        self._began = time.perf_counter()
        self._last: Event | None = None
        """The last event that a rank has sent, samples not counted; None: the first step has not begun."""
        self._early: list[Event] = []
        """The samples that ranks have sent before rank 0 sent the ``start`` event."""
        self._finished: Event | None = None
        """The ``end`` event that the ranks have sent."""
        self._end: Event | None = None
        """The event that the run ends with, once it is known."""
        self._over: Finish | Stop | Exception | None = None
        """The last news: after it the ranks report nothing more, and cannot be asked anything more."""
        self._interrupts = Interrupts(self._interrupted_outside)
        self.rest: list[Event] = []
        """The events after the loop over the events was left."""
        self.told_to_end = False
        """True once the notice to end has cut the run short."""

    def events(self) -> Generator[Event, None, None]:
        """Yields everything that happens, as it happens. Closing the generator (``break``) checkpoints and stops every
        rank at one step; Ctrl-C and the notice to end, also in the body of the loop, save the run within seconds. Once
        the run is over, all leave it as it is. Raises ToldToEnd after the notice, WorkerFailed, CheckpointError,
        RanksDiffer, ApportionError where a host cannot take part, or ValueError for the user's mistakes."""
        try:
            self._interrupts.install()
            yield from self._guarded()
        except (KeyboardInterrupt, ToldToEnd) as interrupt:
            # Where the signal came in the body of the loop, its handler has saved the run and set the end already.
            if self._end is None and not self._failed:
                end = self._save_and_stop(interrupt)
                # Before anything is yielded: a signal from here on finds nothing to save, and is the program's own.
                self._interrupts.restore()
                while self.rest:
                    yield self.rest.pop(0)
                yield end
                explain(interrupt, self._interrupted_text(end, interrupt))
            raise
        except GeneratorExit:
            self._stop_after_break()
            raise
        finally:
            # Held first: an exception of a signal's handler within `_close` would leave processes behind.
            self._interrupts.hold()
            self._close()
            self._interrupts.restore()

    def _guarded(self) -> Iterator[Event]:
        """Yields the events, and notes the place of an interrupt: inside the run, or in the body of the user's loop."""
        self._open()
        for event in self._listen():
            # A generator is suspended in `yield` while the body of the loop runs, so that these two lines say exactly
            # where a signal comes. In the body it cannot be left to `events`, which may be resumed late or never.
            self._interrupts.outside = True
            yield event
            self._interrupts.outside = False
            if self._end is not None:  # an interrupt that the body of the loop has caught
                yield self._end
                return
        if self._finished is not None:
            self._complete()
            # Only now: an interrupt before this line still has a run to save, one after it has not.
            self._end = self._finished
            self._interrupts.outside = True
            yield self._end
            self._interrupts.outside = False

    @abstractmethod
    def _open(self) -> None:
        """Starts the ranks, and the loop that watches their pool. Signals are held back while there is a process that
        ``_close`` would not find."""

    def _close(self) -> None:
        """Ends every process of the run, where they have not ended."""
        if self._recovery is not None:
            self._recovery.close()

    # While the run goes on

    def _listen(self) -> Iterator[Event]:
        """Yields events until every rank has finished. Raises what the run fails with."""
        while True:
            # None is passed on as well: some of what a subclass does (a record that is sent again) is due by the clock.
            news = self._next_news(LOOK_SECONDS)
            yield from self._respond(news)
            if isinstance(news, Finish):
                return
            if isinstance(news, Stop | Exception):
                raise (yield from self._fail(news))

    def _next_news(self, seconds: float) -> News | None:
        """Returns the next news, or None where none comes within this time; notes whether it is the last."""
        assert self._recovery is not None
        news = self._recovery.news(seconds)
        if isinstance(news, Finish | Stop | Exception):
            self._over = news
        return news

    def _respond(self, news: News | None) -> Iterator[Event]:
        """Yields the events of news that come while the run goes on, and does what a message asks of the driver. News
        that come while the run is saved or left go to ``_events_of`` alone."""
        return self._events_of(news)

    def _events_of(self, news: News | None) -> Iterator[Event]:
        """Yields the events of news for the user; the ``end`` is not among them, since it comes last, also where
        another rank still reports something after it."""
        if isinstance(news, Fault):
            yield self._fault(news.loss.rank, news.loss.cause, f"{news.action}{self._fault_remark()}")
        elif isinstance(news, Notice):
            yield self._fault(news.rank, news.cause, news.action)
        elif isinstance(news, RankMessage):
            yield from self._events_of_message(news.rank, news.message)

    def _events_of_message(self, rank: int, message: Mapping[str, Any]) -> Iterator[Event]:
        if message["kind"] == "event":
            yield from self._take_event(rank, Event(**message["event"]))

    def _take_event(self, rank: int, event: Event) -> Iterator[Event]:
        """Notes an event that a rank has sent, and yields it unless it is the ``end``."""
        if event.kind not in self.samples:
            self._last = event
        if event.kind == "end":
            self._finished = self._finished or event
        elif self._last is None:
            # Where ranks do not wait for each other, one may have made steps before rank 0 begins.
            self._early.append(event)
        else:
            yield event
            while self._early:
                yield self._early.pop(0)

    def _fault(self, rank: int, cause: str, action: str, traceback: str | None = None) -> Event:
        return self._own_event("fault", rank=rank, cause=cause, traceback=traceback, action=action)

    def _fault_remark(self) -> str:
        """Returns what is added to the report of a loss, or an empty text."""
        return ""

    def _own_event(self, kind: Any, **data: Any) -> Event:
        """Returns an event of the driver's, at the step of the last one that a rank has sent."""
        return event_after(self._last, kind, time.perf_counter() - self._began, data)

    @abstractmethod
    def _fail(self, news: Stop | Exception) -> Generator[Event, None, Exception]:
        """Ends every process, yields the faults that are still to be reported, and returns what is to be raised."""

    def _complete(self) -> None:  # noqa: B027 (on one host nothing is left)
        """Does what is left to do once every rank has finished, before the ``end`` is yielded."""

    @property
    def _failed(self) -> bool:
        """True once the run has ended with a failure, which is reported and about to be raised."""
        return isinstance(self._over, Stop | Exception)

    # Ctrl-C, and the notice to end

    def _interrupted_outside(self, interrupt: BaseException) -> str:
        """Saves and stops after an interrupt in the body of the loop, which may come back here late or never. Returns
        the text that explains the interrupt. Called by the handler of the signal."""
        if self._failed:
            return f"{cause_of(interrupt)}; {self._stopped_text()}"
        if self._end is None:
            self.rest.append(self._save_and_stop(interrupt))
        assert self._end is not None
        return self._interrupted_text(self._end, interrupt)

    def _stopped_text(self) -> str:
        """Returns that the run had failed before it was interrupted."""
        return "the run had stopped"

    def _interrupted_text(self, end: Event, interrupt: BaseException) -> str:
        """Returns what was saved of the run, and how to go on."""
        return interrupted_text(end, cause_of(interrupt))

    def _save_and_stop(self, interrupt: BaseException | None = None) -> Event:
        """Saves the run without waiting for long, ends every process, and returns the ``end`` event. A second signal
        cuts it short. A run that has come to its end by itself meanwhile keeps that end."""
        why = self._save(interrupt) if self._last is not None else "the first step had not begun"
        if self._finished is not None and self._is_whole(self._finished, why):
            self._end = self._finished
        else:
            self._end = self._interrupted_end(why)
        self.told_to_end = isinstance(interrupt, ToldToEnd) and self._end.data["reason"] == "interrupted"
        self._wind_up()
        return self._end

    @abstractmethod
    def _save(self, interrupt: BaseException | None) -> str | None:
        """Has the ranks save what they have; returns why they did not, or None where they did."""

    @abstractmethod
    def _is_whole(self, finished: Event, why: str | None) -> bool:
        """Tells whether the ranks' own ``end`` event is that of the run, though it was interrupted. ``why``: what
        ``_save`` has returned."""

    @abstractmethod
    def _interrupted_end(self, why: str | None) -> Event:
        """Returns the ``end`` event of a run that is cut short. ``why``: why the last steps are not saved, or None."""

    def _wind_up(self) -> None:
        """Ends every process after the last save."""
        self._close()

    def _end_event(self, why: str | None, resume: str | None, metrics: Mapping[str, float]) -> Event:
        return self._own_event(
            "end",
            reason="interrupted",
            examples_per_second=0.0,
            metrics=dict(metrics),
            run_dir=self._job.run_dir,
            resume=resume,
            why=why,
        )

    # Leaving the loop by ``break``

    def _stop_after_break(self) -> None:
        """Stops all ranks at one step, after the loop over the events was left."""
        self._interrupts.hold()  # from here on a signal is only noted: it cuts the wait short, and raises nothing
        if not self._can_save:
            return
        if isinstance(self._stop_together(STOP_SECONDS, lambda: self._interrupts.pending), Finish):
            self._complete_left()
        else:
            self._give_up_left()

    @property
    def _can_save(self) -> bool:
        """True where there are ranks that have something to save."""
        return self._recovery is not None and self._end is None and not self._failed

    def _stop_together(self, seconds: float, cut: Callable[[], bool], notice: int = 0) -> object:
        """Has all ranks stop at one step, which saves it; returns the last news, or None where it does not come in
        time. ``cut``: whether to wait no longer; ``notice``: the signal that is the notice to end, or 0."""
        self._send_stop(notice)
        for news in self._news_within(seconds, cut):
            self._take_late(news)
        return self._over

    def _news_within(self, seconds: float, cut: Callable[[], bool]) -> Iterator[News | None]:
        """Yields news, and None where none has come for a moment, until the last, or until the time is up or
        ``cut``."""
        allowed = Allowance(seconds)
        while self._over is None and (left := allowed.left) > 0 and not cut():
            yield self._next_news(min(HURRY_SECONDS, left))

    def _take_late(self, news: News | None) -> None:
        """Takes news that come while the run is saved or left, when the user's loop cannot be given their events."""
        self.rest += self._events_of(news)

    @abstractmethod
    def _send_stop(self, notice: int) -> None:
        """Orders all ranks to stop at one step, and to save it."""

    @abstractmethod
    def _complete_left(self) -> None:
        """Does what is left to do once all ranks have stopped at one step."""

    @abstractmethod
    def _give_up_left(self) -> None:
        """Does what can still be done where the ranks have not stopped together."""

    def _warn_of_unsaved(self, why: str) -> None:
        warnings.warn(f"the run was left, and could not be saved as it was: {why}", stacklevel=2)


class RunProof(Protocol):
    """Proves a run before its first step (``api.run_proof``)."""

    @property
    def outdated(self) -> str:
        """Why an earlier proof of this workload is not reused, as the end of a sentence; empty where there is none."""

    def known(self, asked: Mapping[str, Any]) -> Settled | None:
        """Returns what an earlier proof has found, or None."""

    def seconds(self, steps: int) -> float:
        """Returns the seconds that a proof may take before a run of this number of steps."""

    def settle(self, asked: Mapping[str, Any]) -> Settled:
        """Makes the proof, and returns what it has found."""

    def check(self, settled: Settled) -> dict[str, Any]:
        """Returns the verdict as plain JSON. Raises NotProved where the run must not go on."""


@final
class LocalRun(TrainingRun):
    """One run of a job on this machine's processes. Rank 0 writes checkpoints, this process the record of the run."""

    def __init__(self, job: Job, launcher: Local, ranks: int, proof: RunProof | None = None) -> None:
        """Supervises a job. ``proof``: what a job is asked about that is to prove itself."""
        super().__init__(job)
        self._launcher, self._ranks, self._proof = launcher, ranks, proof
        self._pool: WorkerPool | None = None
        """The workers, which belong to the recovery loop's thread: here only ``pids`` and ``send`` may be called."""
        self.started = False
        """True once a ``start`` event has been passed on."""
        self._settling = False
        """True while the ranks wait for the proof."""
        self._ahead = 0.0
        """The seconds by which this process's clock of the run is ahead of the workers', which begin later."""
        self._saved_step: int | None = None
        """The step that rank 0 has saved after an interrupt."""

    def _open(self) -> None:
        self._launcher.prepare()
        self._interrupts.hold()  # no worker may be started and not known
        pool = WorkerPool(self._launcher, "apportion.runtime.worker.entry:train", self._job, self._ranks)
        try:
            self._recovery = RecoveryLoop(pool, spares=self._job.replaceable and sys.platform == "linux")
        except BaseException:  # it has no thread
            pool.close()
            raise
        self._pool = pool
        self._interrupts.release()

    # While the run goes on

    def _respond(self, news: News | None) -> Iterator[Event]:
        if isinstance(news, RankMessage) and news.message["kind"] == "prove":
            return self._settle(news.message)
        return super()._respond(news)

    def _settle(self, asked: Mapping[str, Any]) -> Iterator[Event]:
        """Sends the ranks, which are built and wait, what is known of their strategy; makes the proof first where
        nothing is known."""
        assert self._proof is not None
        assert self._pool is not None
        self._settling = True
        settled = self._proof.known(asked)
        if settled is None:
            seconds = self._proof.seconds(asked["steps"])
            yield self._own_event(
                "proof",
                verdict="begun",
                sentence=f"proving that {self._job.strategy} on {self._ranks} workers trains the same network as one "
                f"device: {seconds:.0f} s at most; without: check=False{self._proof.outdated}",
                seconds=0.0,
                remembered=False,
            )
            settled = self._proof.settle(asked)
            found = {name: getattr(settled, name) for name in ("verdict", "sentence", "seconds", "remembered")}
            yield self._own_event("proof", **found)
        # The check raises where the run must not go on: then the ranks are sent nothing, and `_close` ends them.
        self._pool.send({"kind": "settled", "proof": self._proof.check(settled)})
        self._settling = False

    def _take_event(self, rank: int, event: Event) -> Iterator[Event]:
        if event.kind == "start":  # all workers may have been started again
            if self.started:
                return
            self.started = True
            self._ahead = time.perf_counter() - self._began - event.seconds
        # On this process's clock, as its own events are.
        yield from super()._take_event(rank, replace(event, seconds=event.seconds + self._ahead))

    def _fault_remark(self) -> str:
        """Returns a remark where the proof is of another number of workers than there are now, else an empty text."""
        left = len(self._pool.pids()) if self._pool is not None else 0
        if self._proof is None or left in (0, self._ranks):
            return ""
        return f"; the run is proved for {self._ranks} workers, and {left} are left"

    def _fail(self, news: Stop | Exception) -> Generator[Event, None, Exception]:
        if isinstance(news, Exception):
            return news
        # The processes first: the body of the loop may take its time with the fault, or never come back.
        self._close()
        yield self._fault(news.rank, news.cause, "stops", news.traceback)
        return failure(news)

    # Ctrl-C, and the notice to end

    def _stopped_text(self) -> str:
        return f"{super()._stopped_text()}: {failed_text(self._over)}"

    def _save(self, interrupt: BaseException | None) -> str | None:
        """Has rank 0 write the last update. It does so from another thread than its step, which is not waited for."""
        if self._over is not None:
            return "the run has ended"
        asked = self._ask_to_save([])
        for news in self._news_within(SAVE_SECONDS, lambda: self._interrupts.again):
            if isinstance(news, RankMessage) and news.message["kind"] == "saved":
                self._saved_step = news.message["step"]
                why: str | None = news.message["why"]
                return why
            self._take_late(news)
            if isinstance(news, Stop):
                return news.cause
            if isinstance(news, Finish | Exception):
                return "the run has ended"
            asked = self._ask_to_save(asked)
        return "interrupted again" if self._interrupts.again else f"it took longer than {SAVE_SECONDS:g} s"

    def _ask_to_save(self, asked: list[int]) -> list[int]:
        """Asks rank 0 to save, unless it is the process that was ``asked`` before; returns its process id in a list,
        which is empty where there is none. Rank 0 may just be being replaced, and an order to the lost one is lost."""
        assert self._pool is not None
        first = self._pool.pids()[:1]
        if first != asked:
            self._pool.send({"kind": "save", "seconds": SAVE_SECONDS}, [0])
        return first

    def _is_whole(self, finished: Event, why: str | None) -> bool:
        return why is None or isinstance(self._over, Finish)

    def _interrupted_end(self, why: str | None) -> Event:
        self._close()  # until the processes have ended, one of them may still save a step
        saved = self._steps_saved()
        end = self._end_event(why, resume_command(self._job) if saved else None, {})
        # A replacement of rank 0 may have been asked too, and may have saved a later step before it was ended.
        return replace(end, step=max(self._saved_step or 0, *saved, 0))

    def _steps_saved(self) -> list[int]:
        return RunDirectory(self._job.run_dir).steps() if self._job.run_dir is not None else []

    # Leaving the loop by ``break``

    @property
    def _can_save(self) -> bool:
        # Ranks that wait for the proof have no update to save, and read no order until it comes.
        return super()._can_save and not self._settling

    def _send_stop(self, notice: int) -> None:
        assert self._pool is not None
        self._pool.send({"kind": "stop"})

    def _complete_left(self) -> None:
        if self._finished is not None:
            self.rest.append(self._finished)

    def _give_up_left(self) -> None:
        if not isinstance(self._over, Stop | Exception):  # it takes too long, or was interrupted
            self.rest.append(self._save_and_stop())
            return
        cause, rank = failed_text(self._over), self._over.rank if isinstance(self._over, Stop) else 0
        self.rest.append(self._fault(rank, cause, "stops"))
        self._warn_of_unsaved(cause)


def failed_text(news: object) -> str:
    """Returns why a run has stopped."""
    return news.cause if isinstance(news, Stop) else str(news)


def interrupted_text(end: Event, cause: str = "interrupted") -> str:
    """Returns what was saved of an interrupted run, and how to go on."""
    why, resume = end.data.get("why"), end.data["resume"]
    if end.data["reason"] != "interrupted":
        return f"{cause}; the run had {end.data['reason']} by then: step {end.step} is its last"
    if resume is None:
        return f"{cause} before anything was saved"
    lost = "" if why is None else f"; what followed is not ({why})"
    return f"{cause}; step {end.step} is saved{lost}\ngo on with: {resume}"


def cause_of(interrupt: BaseException) -> str:
    """Returns what has interrupted a run, in words."""
    return interrupt.cause if isinstance(interrupt, ToldToEnd) else "interrupted"


def resume_command(job: Job) -> str | None:
    """Returns how to go on, as it is typed; None where the run has no directory."""
    if job.run_dir is None:
        return None
    if job.address is None or Path(sys.argv[0]).name != "apportion":
        return f"resume=True, run_dir={job.run_dir!r}"
    words = ["apportion", "train", job.address, "--run-dir", job.run_dir, "--resume", "--launcher", job.launcher]
    for name in ("steps", "seed"):
        if name in job.changes:
            words += [f"--{name}", str(job.changes[name])]
    if job.policy != Policy():
        words += ["--policy", str(job.policy)]
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """Returns a word as it is typed in a shell: in double quotes where it has single ones, and nothing that a shell
    reads in double ones."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)
