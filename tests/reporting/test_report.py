"""What a run leaves to be read: events.jsonl, TensorBoard's files, the table at the end, and the page."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from browsers import Browser

from apportion.core.event import Event
from apportion.errors import CheckpointError
from apportion.reporting.html import write_html
from apportion.reporting.html.history import Curve, on_log_scale, read_history, smoothed, thinned
from apportion.reporting.journal import Journal, duration, entries, measure, number, read_events, summary
from apportion.runtime.checkpoint import durable_files

HOSTILE = '</pre></table></svg><script>alert("1")</script><img src="http://host.invalid/x.png">$x_1$ & é'

UNREADABLE = "\udcff"
"""A byte of a file name that is not UTF-8, as Python keeps it."""


def event(kind: Any, step: int = 0, seconds: float = 0.0, /, **data: Any) -> Event:
    return Event(kind=kind, step=step, epoch=step / 100, seconds=seconds, data=data)


def start(first_step: int = 0, **changed: Any) -> Event:
    data = {
        "strategy": "data_parallel(microbatches=2)",
        "launcher": "local(workers=2, threads=1)",
        "workers": 2,
        "threads": 1,
        "device": "cpu",
        "parameters": 1_068_298,
        "examples": 6400,
        "batch_size": 64,
        "steps": 400,
        "steps_per_epoch": 100,
        "first_step": first_step,
        "resumed": first_step > 0,
    }
    return event("start", first_step, **{**data, **changed})


def step(last: int, losses: list[float], seconds: float = 0.0) -> Event:
    rate = 0.1 if last <= 200 else 0.01
    return event("step", last, seconds, values={"loss": losses}, examples_per_second=2000.0, learning_rate=rate)


def loss_at(number: int) -> float:
    return 2.0 * math.exp(-number / 100) + 0.1 * math.sin(number)


def sitting(first: int, last: int) -> Iterable[Event]:
    """Ten steps at a time, of two workers, evaluated and saved at every epoch."""
    yield start(first)
    for done in range(first + 10, last + 1, 10):
        seconds = (done - first) / 30
        yield step(done, [loss_at(n) for n in range(done - 9, done + 1)], seconds)
        for rank in (0, 1):
            parts = {"loading": 0.001, "computing": 0.02 + rank / 100, "waiting": 0.01 - rank / 100, "updating": 0.002}
            yield event("speed", done, seconds, rank=rank, examples_per_second=1000.0 - rank, **parts)
        if done % 100 == 0:
            accuracy = {100: 0.5, 200: 0.9, 300: 0.8, 400: 0.85}[done]
            metrics = {"accuracy": accuracy, "error": 1 - accuracy}
            yield event("evaluation", done, seconds, metrics=metrics, final=done == 400, best=done in (100, 200))
            yield event("checkpoint", done, seconds, path=f"runs/a/step-{done:08d}", seconds=0.02, bytes=4_200_000)


def end(**changed: Any) -> Event:
    metrics = {"accuracy": 0.85, "error": 0.15}
    data = {"reason": "finished", "examples_per_second": 1987.0, "metrics": metrics, "run_dir": "runs/a"}
    return event("end", 400, 10.0, **{**data, **changed})


def resumed() -> list[Event]:
    """A worker dies at step 250; the run goes on from the checkpoint at 200."""
    fault = event("fault", 250, 9.0, rank=1, cause="worker 1 was killed (signal 9)", traceback=None, action="stops")
    return [*sitting(0, 250), fault, *sitting(200, 400), end()]


def keep(run_dir: Path, events: Iterable[Event]) -> Path:
    with Journal(run_dir) as journal:
        for one in events:
            journal.write(one)
    run = {"address": "examples/digits.py:workload", "versions": {"torch": "2.13.0"}, "fingerprint": {"seed": 0}}
    (run_dir / "run.json").write_text(json.dumps(run))
    return run_dir


def same(one: Any, other: Any) -> bool:
    """Equal, where nan equals nan."""
    return repr(one) == repr(other)


def python(code: str, *arguments: object) -> str:
    """What this prints in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# events.jsonl


def test_every_event_is_a_line_of_json_and_reads_back_the_same(tmp_path: Path) -> None:
    events = resumed()
    keep(tmp_path, events)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == [one.kind for one in events]
    assert read_events(tmp_path) == events


def test_the_wall_clock_of_each_event_is_kept(tmp_path: Path) -> None:
    before = time.time()
    keep(tmp_path, [start(), end()])
    times = [at for at, _ in entries(tmp_path)]
    assert before - 0.001 <= times[0] <= times[1] <= time.time() + 0.001


def test_numbers_that_are_not_finite_survive_in_valid_json(tmp_path: Path) -> None:
    losses = [1.5, math.nan, math.inf, -math.inf]
    fault = event("fault", 4, rank=None, cause="NaN", traceback="Infinity", action="stops")
    events = [step(4, losses), event("evaluation", 4, metrics={"accuracy": math.nan}, final=True, best=False), fault]
    keep(tmp_path, events)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert same(read_events(tmp_path), events)  # and the cause "NaN" is still a text


def test_a_line_torn_anywhere_is_passed_over_and_a_resumed_run_goes_on_after_it(tmp_path: Path) -> None:
    path = keep(tmp_path, [start(), step(1, [2.5, math.nan])]) / "events.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for kept in range(first, len(whole)):
        path.write_bytes(whole[:kept])
        lost_only_its_end_of_line = kept == len(whole) - 1
        assert len(read_events(tmp_path)) == 1 + lost_only_its_end_of_line
        with Journal(tmp_path) as journal:
            journal.write(end())
        assert [one.kind for one in read_events(tmp_path)] == ["start", *["step"] * lost_only_its_end_of_line, "end"]


def test_a_torn_line_longer_than_what_is_read_at_once_is_cut_off_whole(tmp_path: Path) -> None:
    path = keep(tmp_path, [start(), step(50_000, [0.123456789] * 50_000)]) / "events.jsonl"
    os.truncate(path, path.stat().st_size - 100)
    Journal(tmp_path).close()
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.processes
def test_a_driver_that_is_killed_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    code = """
        import sys
        from apportion.core.event import Event
        from apportion.reporting.journal import Journal
        journal = Journal(sys.argv[1])
        for step in range(1, 10**9):
            journal.write(Event(kind="step", step=step, epoch=0.0, seconds=0.0, data={"values": {"loss": [0.5] * 300}}))
            print(step, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        while driver.stdout.readline() != "100\n":
            pass
        driver.send_signal(signal.SIGKILL)
        told = 100 + len(driver.stdout.read().split())
    steps = [one.step for one in read_events(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= told


def test_a_damaged_line_before_the_last_is_refused_with_its_number(tmp_path: Path) -> None:
    path = keep(tmp_path, [start(), end()]) / "events.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"kind": \n' + second)
    with pytest.raises(CheckpointError, match=r"events\.jsonl, line 2 is not an event"):
        read_events(tmp_path)


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'none'} the directory of a run?")):
        read_events(tmp_path / "none")
    with pytest.raises(CheckpointError, match="the directory of a run"):
        write_html(tmp_path)


def fill(path: Path) -> None:
    """To the last block."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def write_all(journal: Journal, events: Iterable[Event], *, close: bool = False) -> None:
    for one in events:
        journal.write(one)
    if close:
        journal.close()


@pytest.mark.processes
def test_a_full_disk_is_told_once_and_what_waited_is_written_when_there_is_room(small_disk: Path) -> None:
    losses = [loss_at(n) for n in range(1, 41)]
    events = [start(), *(step(n, losses) for n in range(10, 2000, 10)), end()]
    filler = small_disk / "filler"
    with Journal(small_disk / "run") as journal:
        journal.write(events[0])
        fill(filler)
        with pytest.warns(UserWarning, match="the disk is full") as told:
            write_all(journal, events[1:100])
        assert len([w for w in told if "events.jsonl waits in memory; make room there" in str(w.message)]) == 1
        filler.unlink()
        write_all(journal, events[100:])
    assert same(read_events(small_disk / "run"), events)


@pytest.mark.processes
def test_events_that_never_find_room_are_counted_and_what_is_there_can_be_read(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "MOST_WAITING", 20_000)
    journal = Journal(small_disk / "run")
    journal.write(start())
    fill(small_disk / "filler")
    many = [step(n, [loss_at(n)] * 50) for n in range(10, 1000, 10)]
    with pytest.warns(UserWarning, match="the disk is full") as told:
        write_all(journal, many, close=True)
    found = read_events(small_disk / "run")
    assert 1 <= len(found) < len(many)
    assert same(found[1:], many[: len(found) - 1])
    missing = 1 + len(many) - len(found)
    assert f"{missing} lines are missing" in str([str(w.message) for w in told])


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_ordinary_file_is_neither_followed_nor_appended_to(tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious\n")
    events = tmp_path / "run" / "events.jsonl"
    events.parent.mkdir()
    {"link": lambda: events.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(events), "folder": events.mkdir}[kind]()
    with pytest.raises(CheckpointError, match=re.escape(str(events))):
        Journal(tmp_path / "run")
    with pytest.raises(CheckpointError, match=re.escape(str(events))):
        read_events(tmp_path / "run")
    assert elsewhere.read_text() == "precious\n"


def test_a_run_directory_that_cannot_be_made_is_told_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckpointError, match="choose another run directory"):
        Journal(tmp_path / "taken")


# TensorBoard


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: (step, value) by tag."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_reads_every_tag_with_its_values(tmp_path: Path) -> None:
    keep(tmp_path, [*sitting(0, 100), end()])
    read = scalars(tmp_path)
    assert set(read) == {
        "loss",
        "learning_rate",
        "examples_per_second",
        "worker/0/examples_per_second",
        "worker/1/examples_per_second",
        "evaluation/accuracy",
        "evaluation/error",
    }
    assert read["loss"] == [(n, pytest.approx(loss_at(n), rel=1e-6)) for n in range(10, 101, 10)]
    assert read["worker/1/examples_per_second"][0] == (10, 999.0)
    assert read["evaluation/accuracy"] == [(100, 0.5)]


def test_tensorboard_drops_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    keep(tmp_path, sitting(0, 250))
    keep(tmp_path, sitting(200, 300))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [at for at, _ in scalars(tmp_path)["loss"]] == list(range(10, 301, 10))


def test_tensorboard_is_given_numbers_that_are_not_finite_or_too_large(tmp_path: Path) -> None:
    keep(tmp_path, [step(1, [math.nan]), step(2, [-math.inf]), step(3, [1e300])])
    assert same([value for _, value in scalars(tmp_path)["loss"]], [math.nan, -math.inf, math.inf])


@pytest.mark.processes
def test_without_tensorboard_events_are_kept_all_the_same(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["tensorboard"] = None
        from apportion.core.event import Event
        from apportion.reporting.journal import Journal
        with Journal(sys.argv[1]) as journal:
            journal.write(Event(kind="step", step=1, epoch=0.1, seconds=0.1, data={"values": {"loss": [2.5]}}))
    """
    assert python(code, tmp_path) == ""
    assert [one.step for one in read_events(tmp_path)] == [1]
    assert not (tmp_path / "tensorboard").exists()


def test_a_tensorboard_that_cannot_be_imported_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tensorboard.summary.writer.record_writer"
    pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without RecordWriter
    with pytest.warns(UserWarning, match="no TensorBoard files") as warned:
        keep(tmp_path, [step(1, [2.5]), step(2, [2.4])])
    assert len(warned) == 1
    assert len(read_events(tmp_path)) == 2


@pytest.mark.processes
def test_importing_the_report_imports_nothing_heavy() -> None:
    code = """
        import sys, apportion
        before = set(sys.modules)
        import apportion.reporting.journal, apportion.reporting.html
        print(*{name.partition(".")[0] for name in set(sys.modules) - before})
    """
    assert not {"torch", "matplotlib", "tensorboard", "rich"} & set(python(code).split())


# The table at the end


def test_the_table_of_a_finished_run_tells_all_its_sittings() -> None:
    rows = {row.name: row.text for row in summary(resumed())}
    assert rows == {
        "steps": "400",
        "epochs": "4",
        "time": "19.0 s in 2 sittings",
        "examples/s": "1,987",
        "final loss": measure(loss_at(400)),
        "test accuracy": "0.8500",
        "test error": "0.1500",
        "checkpoint": "runs/a/step-00000400",
        "report": str(Path("runs/a/report.html")),
    }


def test_the_table_of_a_run_that_failed_at_once_tells_what_there_is() -> None:
    fault = event("fault", 0, 0.5, rank=0, cause="boom", traceback=None, action="stops")
    rows = {row.name: row.text for row in summary([start(), fault])}
    assert rows == {"steps": "0 of 400", "epochs": "0", "time": "0.5 s"}
    assert summary([]) == []


def test_the_table_of_an_interrupted_run_keeps_the_last_metrics_and_speed() -> None:
    ended = end(metrics={}, examples_per_second=0.0)
    rows = {row.name: row.value for row in summary([*sitting(0, 200), ended])}
    assert rows["test accuracy"] == 0.9
    assert rows["examples/s"] == 2000.0


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (number(0.1), "0.1"),
        (number(12345.6), "12,346"),
        (number(1.5e12), "1.5e+12"),
        (number(math.nan), "nan"),
        (measure(0.97), "0.9700"),
        (measure(1e-7), "1e-07"),
        (measure(-math.inf), "-inf"),
        (duration(0.034), "0.034 s"),
        (duration(12.34), "12.3 s"),
        (duration(125), "2 min 05 s"),
        (duration(3 * 3600 + 20 * 60), "3 h 20 min"),
    ],
)
def test_numbers_are_written_for_people(written: str, text: str) -> None:
    assert written == text


# The run as its events tell it


def test_the_curves_of_a_resumed_run_are_joined_by_step(tmp_path: Path) -> None:
    again = [step(210, [9.0] * 10, 1.0), step(220, [9.0] * 10, 2.0)]
    history = read_history(keep(tmp_path, [*sitting(0, 250), start(200), *again]))
    loss = history.values["loss"]
    assert loss.x.tolist() == list(range(1, 221))
    assert loss.y[:200].tolist() == [loss_at(n) for n in range(1, 201)]
    assert set(loss.y[200:]) == {9.0}


def test_steps_done_again_after_a_fault_replace_those_that_were_lost(tmp_path: Path) -> None:
    history = read_history(keep(tmp_path, [start(), step(10, [1.0] * 10), step(20, [1.0] * 10), step(15, [2.0] * 8)]))
    assert history.values["loss"].x.tolist() == list(range(1, 16))
    assert history.values["loss"].y.tolist() == [1.0] * 7 + [2.0] * 8


def test_values_that_do_not_come_at_every_step_are_spread_over_them(tmp_path: Path) -> None:
    history = read_history(keep(tmp_path, [start(), step(10, [1.0, 2.0]), step(20, [3.0, 4.0])]))
    assert history.values["loss"].x.tolist() == [5, 10, 15, 20]


def test_time_goes_on_over_the_sittings_and_an_earlier_end_is_forgotten(tmp_path: Path) -> None:
    stopped = event("end", 200, 7.0, reason="stopped", metrics={}, run_dir="a", resume="again")
    history = read_history(keep(tmp_path, [*sitting(0, 200), stopped, start(200), step(210, [1.0], 3.0)]))
    assert history.seconds == 10.0
    assert history.throughput.x[-1] == 10.0
    assert history.end is None
    assert len(history.starts) == 2


def test_where_the_time_went_is_told_of_the_latest_sitting_weighted_by_steps(tmp_path: Path) -> None:
    def speed(at: int, computing: float) -> Event:
        return event("speed", at, rank=0, examples_per_second=1.0, loading=0.0, computing=computing, waiting=0.0)

    nothing = speed(40, 99.0)  # no step since the one before
    events = [start(), speed(10, 50.0), start(10), speed(20, 1.0), speed(40, 4.0), nothing]
    worker = read_history(keep(tmp_path, events)).workers[0]
    assert worker.stages["computing"] == pytest.approx((10 * 1.0 + 20 * 4.0) / 30)
    assert worker.step_seconds == pytest.approx(3.0)


def test_an_evaluation_done_again_counts_once(tmp_path: Path) -> None:
    history = read_history(keep(tmp_path, resumed()))
    assert [moment.event.step for moment in history.evaluations] == [100, 200, 300, 400]


# Thinning and smoothing


def test_thinning_keeps_spikes_and_gaps() -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[12_345], y[54_321], y[77_777] = 40.0, -40.0, np.nan
    thin = thinned(Curve(np.arange(100_000.0), y), buckets=500)
    assert len(thin.x) <= 1501
    assert thin.y[thin.x == 12_345] == [40.0]
    assert thin.y[thin.x == 54_321] == [-40.0]
    assert np.isnan(thin.y[thin.x == 77_777]).all()
    assert (np.diff(thin.x) > 0).all()


def test_smoothing_follows_the_course_and_passes_over_what_is_not_finite() -> None:
    x = np.arange(100_000.0)
    noise = np.random.default_rng(0).normal(size=100_000)
    noise[::1000] = np.inf
    course = smoothed(Curve(x, 1 + x / 1e5 + noise))
    assert np.abs(course.y - (1 + course.x / 1e5)).max() < 0.15
    assert smoothed(Curve(x[:2], x[:2])).y.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 0.1, 0.01], True), ([3.0, 2.0, 1.0], False), ([100.0, 1.0, 0.0], False)]
)
def test_a_log_scale_is_for_positive_values_of_a_wide_range(values: list[float], expected: bool) -> None:
    assert on_log_scale(Curve(np.arange(3.0), np.array(values))) is expected


# The page


class Page(HTMLParser):
    """The elements, the attributes and the text of a page; refuses one whose elements do not close in order."""

    VOID = ("meta", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def assert_needs_nothing_else(self) -> None:
        """No script, and no address but of a place in the page itself."""
        assert not {name for name, _ in self.elements} & {"script", "link", "img", "image", "iframe", "object", "base"}
        for _, attributes in self.elements:
            assert not {"src", "srcset", "xlink:href", "background"} & set(attributes)
            assert not [name for name in attributes if name.startswith("on")]
            assert (attributes.get("href") or "#").startswith("#")
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", self.source))
        assert "@import" not in self.source

    def assert_ids_are_unique(self) -> None:
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        used = {(attributes.get("href") or "").lstrip("#") for tag, attributes in self.elements if tag == "use"}
        assert used <= set(ids)


def spread_over_steps(losses: list[float]) -> list[Event]:
    return [step(last, losses[last - 500 : last], last / 1000) for last in range(500, len(losses) + 1, 500)]


CASES: dict[str, Callable[[], list[Event]]] = {
    "nothing": list,
    "failed at once": lambda: [start(), event("fault", cause="boom", rank=0, traceback="Traceback", action="stops")],
    "one step": lambda: [start(), step(1, [2.5], 0.1)],
    "two steps": lambda: [start(), step(2, [2.5, 2.4], 0.1)],
    "only what is not finite": lambda: [start(), step(3, [math.nan, math.inf, -math.inf], 0.1)],
    "some not finite": lambda: [start(), step(4, [1.0, math.nan, 1.0, 0.5], 0.1)],
    "all equal": lambda: [start(), step(5, [0.0] * 5, 0.1), step(6, [0.0], 0.2)],
    "a spike": lambda: [start(), step(5, [1.0, 1.0, 1e300, -1.0, 1.0], 0.1)],
    "100,000 values": lambda: [start(), *spread_over_steps([1 / (1 + n) for n in range(100_000)])],
    "interrupted": lambda: [
        *sitting(0, 250),
        end(reason="interrupted", metrics={}, resume="apportion train a.py:b --resume"),
    ],
    "resumed": resumed,
    "no named values": lambda: [start(), event("step", 5, 0.1, values={}, examples_per_second=1.0, learning_rate=0.1)],
    "a metric that is not finite": lambda: [
        start(),
        *(event("evaluation", n, n / 9, metrics={"accuracy": math.nan}, final=False, best=False) for n in (1, 2)),
    ],
    "many workers": lambda: [
        start(workers=40),
        *(
            event("speed", n, n / 9, rank=rank, examples_per_second=9.0, loading=0.1, computing=1 / (1 + rank))
            for n in (1, 2)
            for rank in range(40)
        ),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_any_run_has_a_page_that_needs_nothing_else(case: str, tmp_path: Path) -> None:
    path = write_html(keep(tmp_path, CASES[case]()))
    assert path == tmp_path / "report.html"
    page = Page(path)
    page.assert_needs_nothing_else()
    page.assert_ids_are_unique()
    assert "examples/digits.py:workload" in page.text
    assert path.stat().st_size < 600_000
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_the_page_tells_what_was_run_and_how_it_went(tmp_path: Path) -> None:
    page = Page(write_html(keep(tmp_path, resumed())))
    for told in (
        "Finished",
        "data_parallel(microbatches=2)",
        "local(workers=2, threads=1)",
        "2 x 1 thread",
        "1,068,298",
        "400 (100 an epoch)",
        "19.0 s of training, in 2 sittings",
        "0.8500",
        "worker 1 was killed (signal 9)",
        "step-00000400",
        "4.2 MB",
        "2.13.0",
        str(tmp_path / "events.jsonl"),
    ):
        assert told in page.text
    drawn = {attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"}
    assert drawn == {
        "loss against the step",
        "learning rate against the step",
        "accuracy against the epoch",
        "error against the epoch",
        "examples per second of each worker over time, with checkpoints, evaluations and faults",
        "where a step's time goes, by worker",
    }
    assert page.text.count("best 0.9000") == 1  # at epoch 2, not the last
    assert "fingerprint" not in page.text


def test_the_page_of_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    page = Page(write_html(keep(tmp_path, CASES["interrupted"]())))
    assert "Interrupted" in page.text
    assert "apportion train a.py:b --resume" in page.text


def test_text_from_the_run_stays_text(tmp_path: Path) -> None:
    def evaluation(at: int) -> Event:
        return event("evaluation", at, at / 9, metrics={HOSTILE: 0.5 + at}, final=False, best=True)

    values = {HOSTILE: [2.5, 2.4], "loss": [1.0, math.nan]}
    path = keep(
        tmp_path,
        [
            start(strategy=HOSTILE, launcher=HOSTILE, device=HOSTILE),
            *(event("step", at, at / 9, values=values, examples_per_second=1.0, learning_rate=0.1) for at in (2, 4)),
            evaluation(2),
            evaluation(4),
            event("checkpoint", 4, 0.5, path=HOSTILE, seconds=0.1, bytes=1),
            event("fault", 4, 0.5, rank=0, cause=HOSTILE, traceback=HOSTILE + UNREADABLE, action=HOSTILE),
            event("end", 4, 0.6, reason=HOSTILE, metrics={HOSTILE: 1.0}, run_dir=HOSTILE, resume=HOSTILE, why=HOSTILE),
        ],
    )
    (path / "run.json").write_text(json.dumps({"address": HOSTILE, "versions": {HOSTILE: HOSTILE}, "cwd": [HOSTILE]}))
    page = Page(write_html(path))
    page.assert_needs_nothing_else()
    assert page.text.count('<script>alert("1")</script>') >= 10


@pytest.mark.processes
def test_without_matplotlib_the_page_has_the_tables_and_says_how_to_get_the_pictures(tmp_path: Path) -> None:
    keep(tmp_path, resumed())
    code = """
        import sys
        sys.modules["matplotlib"] = None
        from apportion.reporting.html import write_html
        print(write_html(sys.argv[1]))
    """
    page = Page(Path(python(code, tmp_path).strip()))
    page.assert_needs_nothing_else()
    assert 'pip install ".[report]"' in page.text
    assert page.count("svg") == 0
    opened = [attributes for tag, attributes in page.elements if tag == "details" and "open" in attributes]
    assert len(opened) == 4  # evaluations, loss, learning rate, workers
    assert page.text.count(measure(loss_at(400))) >= 2


@pytest.mark.processes
@pytest.mark.thorough
def test_a_report_changes_nothing_of_the_users_own_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    keep(tmp_path, resumed())
    code = """
        import sys, matplotlib
        from apportion.reporting.html import write_html
        matplotlib.rcParams["font.size"] = 33
        matplotlib.rcParams["svg.fonttype"] = "path"
        matplotlib.rcParams["axes.facecolor"] = "#ff0000"
        names = set(matplotlib.rcParams) - {"backend"}  # asking for that one imports pyplot
        before = {name: matplotlib.rcParams[name] for name in names}
        page = write_html(sys.argv[1]).read_text()
        assert {name: matplotlib.rcParams[name] for name in names} == before
        assert "matplotlib.pyplot" not in sys.modules
        assert "33px" not in page and "#ff0000" not in page and "<text" in page
    """
    python(code, tmp_path)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    keep(tmp_path, CASES["two steps"]())
    assert write_html(tmp_path).read_bytes() == write_html(tmp_path).read_bytes()


def test_a_page_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    keep(tmp_path, [start(), end()])
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        write_html(tmp_path)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


# In a real browser


def pixels(png: Path) -> Any:
    """Height x width x (red, green, blue), 0 to 255."""
    image = pytest.importorskip("matplotlib.image").imread(png)
    return (image[..., :3] * 255).round().astype(int)


def share(image: Any, colour: str) -> float:
    """How much of a picture has (almost) this colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(image - wanted).max(-1) <= 6).mean())


@pytest.mark.processes
@pytest.mark.thorough
def test_a_browser_shows_the_curves_and_the_metrics_and_asks_for_nothing(tmp_path: Path, browser: Browser) -> None:
    pytest.importorskip("matplotlib")
    address = write_html(keep(tmp_path / "run", resumed())).as_uri()
    rendered = tmp_path / "rendered.html"
    rendered.write_text(browser("--dump-dom", address))
    assert browser.asked_for() == set()

    page = Page(rendered)
    assert page.count("svg") == 9  # six pictures, three of them for narrow screens too
    assert page.count("path") > 50
    assert "0.8500" in page.text
    assert "best 0.9000" in page.text
    assert "test accuracy" in page.text


@pytest.mark.processes
def test_the_browser_test_would_see_a_request(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "page.html").write_text('<img src="http://host.invalid/a.png">')
    browser("--dump-dom", (tmp_path / "page.html").as_uri())
    assert browser.asked_for() == {"http://host.invalid/a.png"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("scheme", "surface", "line", "bar"),
    [("light", "#ffffff", "#2a78d6", "#12976a"), ("dark", "#1c1c1a", "#4a94ea", "#25ad7e")],
)
@pytest.mark.thorough
def test_the_page_is_painted_in_light_and_in_dark(
    scheme: str, surface: str, line: str, bar: str, tmp_path: Path, browser: Browser
) -> None:
    pytest.importorskip("matplotlib")
    # Without evaluations, faults and another learning rate: the bars stand further up, and less is painted.
    events = [one for one in sitting(0, 200) if one.kind in ("start", "step", "speed")]
    address = write_html(keep(tmp_path / "run", events)).as_uri()
    png = tmp_path / "page.png"
    colours = f"--blink-settings=preferredColorScheme={1 if scheme == 'light' else 0}"
    browser(colours, "--window-size=1100,1500", f"--screenshot={png}", address)
    image = pixels(png)
    assert image.shape == (1500, 1100, 3)
    assert share(image, surface) > 0.5
    assert share(image, line) > 0.0005  # the smoothed loss: 2 pixels high, a thousand across
    assert share(image, bar) > 0.008  # what the workers computed: 20 pixels high, some hundred across
