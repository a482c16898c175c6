"""The events of a run on their way to their readers: each is written into the run directory first, and a report is
drawn of them at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from apportion.core.event import Event
from apportion.errors import CheckpointError
from apportion.reporting.journal import Journal
from apportion.runtime.worker.coordination import OutsideEvents
from apportion.runtime.worker.job import Job

if TYPE_CHECKING:  # a run of which nothing is expected needs none of this
    from apportion.planner.performance_monitor import PerformanceMonitor


def journaled(  # noqa: PLR0913 (what happened before, in and after the events, and what becomes of it)
    job: Job,
    events: Generator[Event, None, None],
    before: list[Event],
    rest: Sequence[Event],
    watch: PerformanceMonitor | None = None,
    *,
    draws: Callable[[], bool] = lambda: True,
    writes: Callable[[], bool] = lambda: True,
    outside: OutsideEvents | None = None,
) -> Generator[Event, None, None]:
    """Yields the events, each written into the run directory on its way; the report before the last, so that the loop
    may be left there at once. ``before``: what happened before the first; ``rest``: what happens after the loop was
    left; ``watch``: holds them against what was expected, and adds what there is to tell; ``writes``: whether this
    process is the one that writes; ``draws``: whether there is time for the report; ``outside``: what another process
    has seen of the run, and this one is to write."""
    assert job.run_dir is not None
    record = _Record(job.run_dir, before, draws)
    try:
        for event in events:
            if writes():
                if event.kind == "end":  # with which the report is drawn
                    record.take_outside(outside)
                record.take(event)
                record.take_outside(outside)
            yield event
            drifted = watch.take(event) if watch is not None else None
            if drifted is not None:
                if writes():
                    record.take(drifted)
                yield drifted
    except CheckpointError as error:
        events.throw(error)  # a run that cannot be written down is not to be saved either
    finally:
        with ExitStack() as ends:  # the record's files are closed also where the end of the run fails
            ends.callback(record.close, rest, outside)
            events.close()


class _Record:
    """Writes down a run in its directory: its events, and the report."""

    def __init__(self, run_dir: str, before: list[Event], draws: Callable[[], bool]) -> None:
        """Takes ``before``: what happened before the first event; ``draws``: whether there is time for the report."""
        self._run_dir, self._before, self._draws = run_dir, before, draws
        self._journal: Journal | None = None
        self._drawn = False

    def take(self, event: Event) -> None:
        """Write an event; the last one is followed by the report."""
        if self._journal is None and event.kind == "proof":
            self._before.append(event)
        elif self._journal is None and event.kind not in ("fault", "end"):  # what never started leaves no directory
            self._journal = Journal(self._run_dir)
            for earlier in self._before:
                self._journal.write(earlier)
        if self._journal is not None:
            self._journal.write(event)
            if event.kind == "end" and self._draws():
                _report(self._run_dir)
                self._drawn = True

    def take_outside(self, outside: OutsideEvents | None) -> None:
        """Writes what another process has seen, once the run has begun."""
        if self._journal is None or outside is None:
            return
        for number, event in outside.pop_events():
            self._journal.write(event)
            outside.mark_recorded(number)
            self._drawn = False

    def close(self, rest: Sequence[Event], outside: OutsideEvents | None) -> None:
        """Write what has happened after the loop was left, and the report where that is not drawn yet."""
        if self._journal is None:
            return
        try:
            self.take_outside(outside)
            for event in rest:
                self._journal.write(event)
        except CheckpointError as error:
            warnings.warn(str(error), stacklevel=2)
        finally:
            self._journal.close()
        if (rest or not self._drawn) and self._draws():
            _report(self._run_dir)


def draw_report(run_dir: str) -> None:
    """Draws the report of a run directory; where that cannot be done, a warning says why."""
    _report(run_dir)


def _report(run_dir: str) -> None:
    try:
        from apportion.reporting.html import write_html  # at the end: it draws

        write_html(run_dir)
    except CheckpointError as error:  # the run itself is whole, or its own error is on its way
        warnings.warn(f"no report: {error}", stacklevel=2)
    except Exception as error:  # events that someone has changed: no reason to end a run that is whole
        warnings.warn(f"no report, drawing it failed: {type(error).__name__}: {error}", stacklevel=2)
