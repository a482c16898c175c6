"""A run seen from the driver: starts the workers, passes on what they tell, and does what ``supervise`` decides."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from apportion.crew import LOOK_SECONDS, Crew, failure
from apportion.event import Event
from apportion.job import Job
from apportion.launch.local import Local
from apportion.supervise import Finish, GoOn, Stop

SAVE_SECONDS = 4.0
"""After Ctrl-C: how long writing the last update may take."""
STOP_SECONDS = 120.0
"""After ``break``: how long the step under way and its checkpoint may take."""


class Supervised:
    """One run of a job on this machine's processes."""

    def __init__(self, job: Job, launcher: Local, ranks: int) -> None:
        self._job, self._launcher, self._ranks = job, launcher, ranks
        self._interrupted = False
        self._began = time.perf_counter()
        self._last: Event | None = None

    def events(self) -> Iterator[Event]:
        """Everything that happens, as it happens. Closing it (``break``) checkpoints and stops every rank at one step;
        Ctrl-C writes the last update at once. Raises WorkerFailed, or ValueError for the user's mistakes."""
        restore = self._catch_interrupt()
        crew = None
        try:
            crew = Crew(self._launcher, "apportion.entry:train", self._job, self._ranks)
            yield from self._listen(crew)
        except KeyboardInterrupt:
            if crew is not None:
                yield self._save_and_stop(crew)
            raise
        except GeneratorExit:
            if crew is not None:
                self._leave(crew)
            raise
        finally:
            if crew is not None:
                crew.close()
            restore()

    def _catch_interrupt(self) -> Callable[[], None]:
        """Note Ctrl-C also when it falls outside this generator, in the body of the user's loop."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            return lambda: None

        def note(number: int, frame: Any) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, note)

        def restore() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)

        return restore

    def _listen(self, crew: Crew) -> Iterator[Event]:
        seconds: float | None = 0.0
        while True:
            for _, message in crew.hear(LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)):
                if message["kind"] == "event":
                    yield self._event(message["event"])
            action = crew.action()
            if isinstance(action, Finish):
                for _, message in crew.drain():
                    if message["kind"] == "event":
                        yield self._event(message["event"])
                return
            if isinstance(action, Stop):
                yield self._own_event(
                    "fault", rank=action.rank, cause=action.cause, traceback=action.traceback, action="stops"
                )
                raise failure(action)
            assert isinstance(action, GoOn)
            seconds = action.seconds

    def _event(self, fields: dict[str, Any]) -> Event:
        event = Event(**fields)
        if event.kind != "speed":
            self._last = event
        return event

    def _own_event(self, kind: Any, **data: Any) -> Event:
        last = self._last
        return Event(
            kind=kind,
            step=last.step if last else 0,
            epoch=last.epoch if last else 0.0,
            seconds=time.perf_counter() - self._began,
            data=data,
        )

    def _save_and_stop(self, crew: Crew) -> Event:
        """The last update, without waiting for the step under way."""
        crew.send({"kind": "save"}, [0])
        deadline = time.monotonic() + SAVE_SECONDS
        saved: dict[str, Any] = {"step": None, "why": f"it took longer than {SAVE_SECONDS:.0f} s"}
        waiting = True
        while waiting and time.monotonic() < deadline:
            for _, message in crew.hear(min(LOOK_SECONDS, deadline - time.monotonic())):
                if message["kind"] == "saved":
                    saved, waiting = message, False
            if isinstance(crew.action(), Stop | Finish):
                break
        crew.close()
        event = self._own_event(
            "end",
            reason="interrupted",
            examples_per_second=0.0,
            metrics={},
            run_dir=self._job.run_dir,
            resume=resume_command(self._job),
            why=saved["why"],
        )
        return replace(event, step=saved["step"] if saved["step"] is not None else event.step)

    def _leave(self, crew: Crew) -> None:
        """The loop over the events was left: stop all ranks at one step; after Ctrl-C at once."""
        if self._interrupted:
            self._save_and_stop(crew)
            return
        crew.send({"kind": "stop"})
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            for _ in crew.hear(LOOK_SECONDS):
                pass
            if not isinstance(crew.action(), GoOn):
                return


def resume_command(job: Job) -> str | None:
    """How to go on, as it is typed."""
    if job.run_dir is None:
        return None
    if job.address is None or "apportion" not in sys.argv[0]:
        return f"resume=True, run_dir={job.run_dir!r}"
    return f"apportion train {shlex.quote(job.address)} --run-dir {shlex.quote(job.run_dir)} --resume"
