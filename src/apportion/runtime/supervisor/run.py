"""A run seen from the driver: starts the workers, passes on what they tell, and does what ``decisions`` decides."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from apportion.core.event import Event, event_after
from apportion.core.policy import Policy
from apportion.errors import ToldToEnd
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.launch.local import Local
from apportion.runtime.notice import explain
from apportion.runtime.proof.proof import Settled
from apportion.runtime.supervisor.decisions import Finish, Stop, failure
from apportion.runtime.supervisor.failures import Notice
from apportion.runtime.supervisor.interrupts import Interrupts
from apportion.runtime.supervisor.recovery import Fault, News, RecoveryLoop, Said
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Allowance
from apportion.runtime.supervisor.worker_pool import AnyThreadPool, WorkerPool
from apportion.runtime.worker.job import Job

SAVE_SECONDS = 3.5
"""The seconds that writing the last update may take after Ctrl-C, or after the notice to end."""
HURRY_SECONDS = 0.1
"""The seconds within which a second Ctrl-C is noticed while the last update is written."""
STOP_SECONDS = 120.0
"""The seconds that the step under way and its checkpoint may take after ``break``."""


class RunProof(Protocol):
    """Proves a run before its first step (``api.run_proof``)."""

    @property
    def outdated(self) -> str:
        """Why an earlier proof of this workload is not reused, as the end of a sentence; empty where there is none."""

    def known(self, asked: Mapping[str, Any]) -> Settled | None:
        """Returns what an earlier proof has found, or None."""

    def seconds(self, steps: int) -> float:
        """Returns the seconds that a proof may take before a run of so many steps."""

    def settle(self, asked: Mapping[str, Any]) -> Settled:
        """Makes the proof, and returns what it has found."""

    def check(self, settled: Settled) -> dict[str, Any]:
        """Returns the verdict as plain JSON. Raises NotProved where the run must not go on."""


class RunSupervisor:
    """One run of a job on this machine's processes."""

    def __init__(self, job: Job, launcher: Local, ranks: int, proof: RunProof | None = None) -> None:
        """Supervises a job. ``proof``: what a job is asked about that is to prove itself."""
        self._job, self._launcher, self._ranks, self._proof = job, launcher, ranks, proof
        self._pool: AnyThreadPool | None = None
        self._recovery: RecoveryLoop | None = None
        self.started = False
        """True once a ``start`` event has been passed on."""
        self._settling = False
        """True while the ranks wait for the proof."""
        self._began = time.perf_counter()
        self._ahead = 0.0
        """The seconds by which this process's clock of the run is ahead of the workers', which begin later."""
        self._last: Event | None = None
        self._end: Event | None = None
        """The event that the run ends with, once it is known."""
        self._finished: Event | None = None
        """The ``end`` event that the workers have sent."""
        self._over: Finish | Stop | Exception | None = None
        """The last news: after it the workers have nothing more to tell, and nothing more to be asked."""
        self._interrupts = Interrupts(self._interrupted_outside)
        self.rest: list[Event] = []
        """The events after the loop over the events was left."""
        self.told_to_end = False
        """True once the notice to end has cut the run short."""

    def events(self) -> Generator[Event, None, None]:
        """Yields everything that happens, as it happens. Closing the generator (``break``) checkpoints and stops every
        rank at one step; Ctrl-C and the notice to end, also in the body of the loop, write the last update at once.
        Once the run is over, all leave it as it is. Raises ToldToEnd after the notice, WorkerFailed, CheckpointError,
        RanksDiffer, or ValueError for the user's mistakes."""
        try:
            self._interrupts.install()
            yield from self._guarded()
        except (KeyboardInterrupt, ToldToEnd) as interrupt:
            if self._end is None and not self._failed():
                end = self._save_and_stop()
                self._note_notice(interrupt)
                self._interrupts.restore()
                while self.rest:
                    yield self.rest.pop(0)
                yield end
                explain(interrupt, interrupted_text(end, cause_of(interrupt)))
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
        for event in self._listen(self._recovery):
            self._interrupts.outside = True
            yield event
            self._interrupts.outside = False
            if self._end is not None:  # an interrupt that the body of the loop has caught
                yield self._end
                return
        if self._finished is not None:
            self._end = self._finished
            self._interrupts.outside = True
            yield self._end
            self._interrupts.outside = False

    def _close(self) -> None:
        if self._recovery is not None:
            self._recovery.close()

    def _listen(self, recovery: RecoveryLoop) -> Iterator[Event]:
        while True:
            news = self._news(recovery, LOOK_SECONDS)
            if isinstance(news, Said) and news.message["kind"] == "prove":
                yield from self._settle(news.message)
                continue
            event = self._told(news)
            if event is not None:
                yield event
            if isinstance(news, Finish):
                return
            if isinstance(news, Stop):
                self._close()
                yield self._fault(news.rank, news.cause, "stops", news.traceback)
                raise failure(news)
            if isinstance(news, Exception):
                raise news

    def _settle(self, asked: Mapping[str, Any]) -> Iterator[Event]:
        """Tells the ranks, which are built and wait, what is known of their strategy; makes the proof first where
        nothing is known."""
        assert self._proof is not None
        assert self._pool is not None
        self._settling = True
        settled = self._proof.known(asked)
        if settled is None:
            seconds = self._proof.seconds(asked["steps"])
            yield self._proof_event(
                verdict="begun",
                sentence=f"proving that {self._job.strategy} on {self._ranks} workers trains the same network as one "
                f"device: {seconds:.0f} s at most; without: check=False{self._proof.outdated}",
                seconds=0.0,
                remembered=False,
            )
            settled = self._proof.settle(asked)
            told = {name: getattr(settled, name) for name in ("verdict", "sentence", "seconds", "remembered")}
            yield self._proof_event(**told)
        self._pool.send({"kind": "settled", "proof": self._proof.check(settled)})
        self._settling = False

    def _proof_event(self, **data: Any) -> Event:
        return self._own_event("proof", **data)

    def _news(self, recovery: RecoveryLoop, seconds: float) -> News | None:
        """Returns the next news, or None where none comes within this time; notes whether it is the last."""
        news = recovery.news(seconds)
        if isinstance(news, Finish | Stop | Exception):
            self._over = news
        return news

    def _told(self, news: News | None) -> Event | None:
        """Returns news as an event, where it is one for the user. The ``end`` is kept: it comes last, also where
        another rank still has something to tell."""
        if isinstance(news, Fault):
            return self._fault(news.loss.rank, news.loss.cause, f"{news.action}{self._proved_for()}")
        if isinstance(news, Notice):
            return self._fault(news.rank, news.cause, news.action)
        if not isinstance(news, Said) or news.message["kind"] != "event":
            return None
        event = Event(**news.message["event"])
        if event.kind == "start":  # all workers may have been started again
            if self.started:
                return None
            self.started = True
            self._ahead = time.perf_counter() - self._began - event.seconds
        event = replace(event, seconds=event.seconds + self._ahead)  # on this process's clock, as its own events are
        if event.kind != "speed":
            self._last = event
        if event.kind == "end":
            self._finished = self._finished or event
            return None
        return event

    def _fault(self, rank: int, cause: str, action: str, traceback: str | None = None) -> Event:
        return self._own_event("fault", rank=rank, cause=cause, traceback=traceback, action=action)

    def _proved_for(self) -> str:
        """Returns a remark where the proof is of another number of workers than there are now, else an empty text."""
        left = len(self._pool.pids()) if self._pool is not None else 0
        if self._proof is None or left in (0, self._ranks):
            return ""
        return f"; the run is proved for {self._ranks} workers, and {left} are left"

    def _own_event(self, kind: Any, **data: Any) -> Event:
        return event_after(self._last, kind, time.perf_counter() - self._began, data)

    def _interrupted_outside(self, interrupt: BaseException) -> str:
        """Saves and stops after an interrupt in the body of the loop, which may come back here late or never. Returns
        what to tell."""
        if self._failed():
            return f"{cause_of(interrupt)}; the run had stopped: {failed_text(self._over)}"
        if self._end is None:
            self.rest.append(self._save_and_stop())
            self._note_notice(interrupt)
        assert self._end is not None
        return interrupted_text(self._end, cause_of(interrupt))

    def _note_notice(self, interrupt: BaseException) -> None:
        assert self._end is not None
        self.told_to_end = isinstance(interrupt, ToldToEnd) and self._end.data["reason"] == "interrupted"

    def _failed(self) -> bool:
        """Tells whether the run has ended with a failure, which is reported and about to be raised."""
        return isinstance(self._over, Stop | Exception)

    def _save_and_stop(self) -> Event:
        """Saves the last update without waiting for the step under way, and returns the ``end`` event. A second signal
        cuts it short. A run that has come to its end by itself meanwhile keeps that end."""
        step, why = self._save() if self._last is not None else (None, "the first step had not begun")
        self._close()
        if self._finished is not None and (isinstance(self._over, Finish) or why is None):
            self._end = self._finished
            return self._end
        saved = self._steps_saved()
        end = self._own_event(
            "end",
            reason="interrupted",
            examples_per_second=0.0,
            metrics={},
            run_dir=self._job.run_dir,
            resume=resume_command(self._job) if saved else None,
            why=why,
        )
        # A replacement of rank 0 may have been asked too, and may have saved a later step before it was ended.
        self._end = replace(end, step=max(step or 0, *saved, 0))
        return self._end

    def _steps_saved(self) -> list[int]:
        return RunDirectory(self._job.run_dir).steps() if self._job.run_dir is not None else []

    def _save(self) -> tuple[int | None, str | None]:
        """Asks rank 0 to save; returns (the step that was saved, why none was)."""
        assert self._pool is not None
        assert self._recovery is not None
        if self._over is not None:
            return None, "the run has ended"
        asked: list[int] = []
        allowed = Allowance(SAVE_SECONDS)
        while (left := allowed.left) > 0 and not self._interrupts.again:
            if asked != (asked := self._pool.pids()[:1]):  # rank 0 may just be being replaced
                self._pool.send({"kind": "save", "seconds": SAVE_SECONDS}, [0])
            news = self._news(self._recovery, min(HURRY_SECONDS, left))
            if isinstance(news, Said) and news.message["kind"] == "saved":
                return news.message["step"], news.message["why"]
            if (event := self._told(news)) is not None:
                self.rest.append(event)
            if isinstance(news, Stop):
                return None, news.cause
            if isinstance(news, Finish | Exception):
                return None, "the run has ended"
        return None, "interrupted again" if self._interrupts.again else f"it took longer than {SAVE_SECONDS:g} s"

    def _leave(self) -> None:
        """Stops all ranks at one step, after the loop over the events was left."""
        self._interrupts.hold()
        if self._pool is None or self._recovery is None or self._end is not None or self._failed():
            return
        if self._settling:  # the ranks wait for the proof, and have no update to save
            return
        self._pool.send({"kind": "stop"})
        allowed = Allowance(STOP_SECONDS)
        while allowed.left > 0:
            news = self._news(self._recovery, LOOK_SECONDS)
            if (event := self._told(news)) is not None:
                self.rest.append(event)
            if isinstance(news, Finish):
                if self._finished is not None:
                    self.rest.append(self._finished)
                return
            if isinstance(news, Stop | Exception):
                cause, rank = failed_text(news), news.rank if isinstance(news, Stop) else 0
                self.rest.append(self._fault(rank, cause, "stops"))
                warnings.warn(f"the run was left, and could not be saved as it was: {cause}", stacklevel=2)
                return
            if self._interrupts.pending:
                break
        self.rest.append(self._save_and_stop())


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
