"""A rank that torchrun, srun or MPI has started, and a signal that tells it to end.

The rank only notes the signal: all ranks agree at the next point at which they ask each other (``StepCoordinator``),
stop at one step, and save it. A step that takes longer than LATE_SECONDS is not waited for where rank 0 can save the
last update without the others.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, final

from apportion.core.event import Event
from apportion.errors import ApportionError, CheckpointError, ToldToEnd
from apportion.runtime.notice import SAME_SECONDS, RunHandlers, explain, raised_by, requeue_job
from apportion.runtime.supervisor.run import cause_of, interrupted_text, resume_command
from apportion.runtime.worker.coordination import RunControl
from apportion.runtime.worker.job import Job

LATE_SECONDS = 3.5
"""The seconds from a signal in which the ranks have to agree where to stop; then rank 0 saves what it has."""


@final
class RankNotice:
    """What one rank does about the notice to end, and about Ctrl-C. ``control``: of its run."""

    def __init__(self, control: RunControl) -> None:
        self.control, control.known = control, self.expect
        self._handlers = RunHandlers(self._note)
        self._at: float | None = None
        """The time of the first signal."""
        self._again = False
        self._late: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._job: Job | None = None
        self._rank = 0
        self._end: Event | None = None

    def expect(self, job: Job, rank: int) -> None:
        """Takes the job, once it is known, and the rank of this process."""
        self._job, self._rank = job, rank
        self.control.resume = resume_command(job)

    def heed(self, events: Generator[Event, None, None]) -> Iterator[Event]:
        """Yields the events of the run. Raises ToldToEnd, or KeyboardInterrupt, once a run is over that a signal has
        cut short, on every rank."""
        self._handlers.install()
        threading.Thread(target=self._save_late, name="notice", daemon=True).start()
        try:
            for event in events:
                if event.kind == "end":
                    self._end = event
                yield event
            if self._end is not None and self._end.data["reason"] == "interrupted":
                raise raised_by(self.control.notice)
        except ApportionError as error:
            if self._at is None or isinstance(error, CheckpointError):
                raise
            raise self._alone(error) from error
        except (KeyboardInterrupt, ToldToEnd) as interrupt:
            self._tell(interrupt)
            raise
        finally:
            events.close()
            self._handlers.restore()
            self._late.put(0)
            if self._end is not None and self._end.data["reason"] == "interrupted":
                self._requeue()

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._at is None:
            self._at = now
            if not self.control.begun.is_set():
                raise raised_by(number)
            self.control.notice = number
            self._late.put(number)
        elif number == signal.SIGHUP:
            return  # a shell passes on the one that it gets: a second one does not count as a second request
        elif now - self._at > SAME_SECONDS and not (self.control.ending and self._first_again()):
            self._handlers.restore()
            os.kill(os.getpid(), number)  # as if nothing were there to be saved

    def _first_again(self) -> bool:
        """Tells whether a signal is the second one: torchrun sends it to all ranks once one of them has ended, and
        these are about to end."""
        first, self._again = not self._again, True
        return first

    def _tell(self, interrupt: BaseException) -> None:
        if self._end is not None:
            text = interrupted_text(self._end, cause_of(interrupt))
        else:
            text = f"{cause_of(interrupt)} before the first step"
        if self._rank == 0:
            explain(interrupt, text)
        else:
            interrupt.add_note(text)

    def _alone(self, error: ApportionError) -> BaseException:
        """Returns what is raised where another rank was gone before all had agreed; rank 0 saves what it has."""
        number = self.control.notice
        interrupt, step = raised_by(number), self._saved()
        what = "nothing more is saved" if step is None else f"step {step} is saved"
        text = f"{cause_of(interrupt)}; {what}: the ranks did not stop together ({error})"
        if self._rank == 0:
            explain(interrupt, f"{text}\ngo on with: {self.control.resume}")
        else:
            interrupt.add_note(text)
        return interrupt

    def _saved(self) -> int | None:
        """Saves the last update without the other ranks, in rank 0; returns its number, or None where that cannot
        be."""
        if self._rank:
            return None
        try:
            return self.control.save_now()
        except Exception:  # only the ranks together have the state, or the disk is full
            return None

    def _save_late(self) -> None:
        """Saves the last update and ends rank 0, where the ranks do not agree in time where to stop: a step takes long,
        or an evaluation, or what the program does with an event."""
        number = self._late.get()
        if not number or self._rank:
            return
        try:
            self._late.get(timeout=LATE_SECONDS)
        except queue.Empty:
            if self.control.ending or (step := self._saved()) is None:
                return  # the ranks are waited for, for as long as the sender of the signal lets them run
            text = f"{cause_of(raised_by(number))}; step {step} is saved\ngo on with: {self.control.resume}\n"
            with suppress(OSError, ValueError, AttributeError):  # the terminal may be what has ended the run
                sys.stderr.write(text)
                sys.stderr.flush()
            self._requeue()
            os._exit(128 + number)

    def _requeue(self) -> None:
        if self._rank == 0 and self._job is not None and self.control.was_notified():
            requeue_job(self._job.policy)
