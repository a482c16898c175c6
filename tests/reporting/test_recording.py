"""The events of a run as they are written down: a drift reaches whoever reads them, and the files of a run are closed
however it ends."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from apportion.core.event import Event
from apportion.errors import WorkerFailed
from apportion.planner.performance_monitor import WINDOW, Expected, PerformanceMonitor
from apportion.reporting import recording
from apportion.reporting.journal import Journal, read_events
from apportion.reporting.recording import journaled
from apportion.runtime.worker.job import Job
from apportion.strategies.single_device import SingleDevice


def events() -> Generator[Event, None, None]:
    def event(kind: str, **data: object) -> Event:
        return Event(kind=kind, step=3, epoch=0.1, seconds=1.0, data=data)  # type: ignore[arg-type]

    yield event("start", strategy="single_device", launcher="local", steps=100, first_step=0, threads=1)
    for _ in range(3 * WINDOW):
        yield event("speed", rank=0, examples_per_second=1.0, loading=0.0, computing=0.02, waiting=0.0, updating=0.0)
    yield event("end", reason="finished", examples_per_second=1.0, metrics={}, run_dir="run", resume=None, why=None)


@pytest.mark.usefixtures("reports")
def test_a_drift_is_told_once_kept_and_shown_in_the_report(tmp_path: Path) -> None:
    expected = Expected(step_seconds=0.01, terms={"computing": 0.01}, measured=True)
    job = Job(workload="none.py:none", strategy=SingleDevice(), run_dir=str(tmp_path / "run"))
    told = list(journaled(job, events(), [], [], PerformanceMonitor(expected)))
    drifts = [event for event in told if event.kind == "drift"]
    assert len(drifts) == 1
    assert drifts[0].data["ratio"] == pytest.approx(2.0)
    assert [e.kind for e in read_events(job.run_dir or "")].count("drift") == 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "2.00 times the measured 10 ms: computing takes 2.00 times as long" in page


def events_whose_end_fails() -> Generator[Event, None, None]:
    try:
        yield from events()
    finally:
        raise WorkerFailed("rank 1 did not end")


def test_the_files_of_a_run_are_closed_though_its_end_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over the events is left in the middle, and what the run has to do then goes wrong."""
    closed: list[Journal] = []

    class Noted(Journal):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(recording, "Journal", Noted)
    job = Job(workload="none.py:none", strategy=SingleDevice(), run_dir=str(tmp_path / "run"))
    told = journaled(job, events_whose_end_fails(), [], [])
    next(told)
    with pytest.raises(WorkerFailed, match="rank 1 did not end"):
        told.close()
    assert len(closed) == 1
    assert [event.kind for event in read_events(tmp_path / "run")] == ["start"]
