"""The history of a run from its events, over all its sittings: curves by step, speeds by time, what happened when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.core.event import Event
from apportion.reporting.journal import RunClock, TableRow, entries, summary

Floats = NDArray[np.float64]
STAGES = ("loading", "computing", "waiting", "updating")


@dataclass(frozen=True)
class Curve:
    """Values against what they belong to: a step, or seconds of training."""

    x: Floats
    y: Floats


@dataclass(frozen=True)
class WorkerHistory:
    """One rank's speed, and where the time of its steps went."""

    rank: int
    speed: Curve
    """The examples a second of the worker, against seconds of training."""
    stages: Mapping[str, float]
    """The seconds of a step, mean over the run: loading, computing, waiting, updating."""

    @property
    def step_seconds(self) -> float:
        """The seconds that a step of the worker takes."""
        return sum(self.stages.values())


@dataclass(frozen=True)
class Moment:
    """An event, when it came."""

    seconds: float
    """The seconds of training until the event, over all sittings."""
    time: float
    """The time of the event, in seconds since 1970."""
    event: Event


@dataclass(frozen=True)
class History:
    """A run as the report shows it."""

    run_dir: Path
    run: Mapping[str, Any]
    """The content of run.json; empty where there is none."""
    rows: list[TableRow]
    values: Mapping[str, Curve]
    """The curve of each named value against the step."""
    learning_rate: Curve
    throughput: Curve
    """The examples a second of all workers together, against seconds of training."""
    workers: list[WorkerHistory]
    plans: list[Moment]
    drifts: list[Moment]
    starts: list[Moment]
    rollouts: list[Moment]
    evaluations: list[Moment]
    checkpoints: list[Moment]
    faults: list[Moment]
    end: Moment | None
    """The moment of the end; None: the run has not ended, or was killed."""
    began: float | None
    """The time at which the run was started, in seconds since 1970; None: there are no events."""
    ended: float | None
    seconds: float
    """The seconds of training, over all sittings."""
    preparing: float
    """The seconds before the first step of each sitting, which are no part of ``seconds``."""

    @property
    def start(self) -> Mapping[str, Any]:
        """The data that the latest sitting started with."""
        return self.starts[-1].event.data if self.starts else {}

    @property
    def frames(self) -> int:
        """The steps of environments in a step of the training; 0 where its examples are not made by what it does."""
        return int(self.start.get("frames") or 0) * int(self.start.get("batch_size") or 0)


def read_history(run_dir: str | Path) -> History:
    """Read the history of a run from run.json and events.jsonl. Raises CheckpointError where there are no events to be
    read."""
    reader = _Reader()
    rows = summary(reader.taking(entries(run_dir)))
    return reader.history(Path(run_dir), rows)


def _read_run(path: Path) -> Mapping[str, Any]:
    """Read run.json; empty where there is none: the report can do without it, and a run that failed at once may not
    have written it."""
    try:
        run = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


class _Growing:
    """A curve that is being read. A value that is recorded again replaces the earlier one: a run that lost a worker, or
    was resumed, goes on from its last checkpoint."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Floats, Floats]] = []

    def add(self, x: Floats, y: Floats) -> None:
        self.rewind(float(x[0]))
        self._pieces.append((x, y))

    def rewind(self, x: float) -> None:
        """Forget all values from x on."""
        while self._pieces and self._pieces[-1][0][-1] >= x:
            xs, ys = self._pieces.pop()
            if xs[0] < x:
                keep = xs < x
                self._pieces.append((xs[keep], ys[keep]))

    def curve(self) -> Curve:
        empty = np.zeros(0)
        xs, ys = zip(*self._pieces, strict=True) if self._pieces else ((empty,), (empty,))
        return Curve(np.concatenate(xs), np.concatenate(ys))


@dataclass
class _WorkerReader:
    """The ``speed`` events of one rank, added up."""

    step: int
    """The step of the rank's previous event."""
    seconds: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    steps: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    def start(self, step: int) -> None:
        """Begin a new sitting: its steps may be divided otherwise, and only they count."""
        self.step, self.steps, self.stages = step, 0.0, {}

    def take(self, seconds: float, event: Event) -> None:
        if event.step == self.step:
            return  # no step since: nothing was measured
        steps = max(1, event.step - self.step)  # 1: it went back after a fault
        self.step = event.step
        self.seconds.append(seconds)
        self.speeds.append(event.data.get("examples_per_second") or 0.0)
        self.steps += steps
        for stage in STAGES:
            self.stages[stage] = self.stages.get(stage, 0.0) + steps * float(event.data.get(stage) or 0.0)

    def worker(self, rank: int) -> WorkerHistory:
        speed = Curve(np.asarray(self.seconds), np.asarray(self.speeds, dtype=float))
        return WorkerHistory(rank, speed, {stage: total / self.steps for stage, total in self.stages.items()})


class _Reader:
    """A reader that turns events into a History."""

    def __init__(self) -> None:
        self._clock = RunClock()
        self._began: float | None = None
        self._ended: float | None = None
        self._values: dict[str, _Growing] = {}
        self._learning_rate = _Growing()
        self._throughput: list[tuple[float, float]] = []
        self._workers: dict[int, _WorkerReader] = {}
        self._moments: dict[str, list[Moment]] = {}
        self._first_step = 0
        self._last_step = 0
        self._fresh = False

    def taking(self, events: Iterable[tuple[float, Event]]) -> Iterator[Event]:
        """Yield the events unchanged, and take each in as it passes."""
        for time, event in events:
            self._take(time, event)
            yield event

    def _take(self, time: float, event: Event) -> None:
        seconds = self._clock.tick(event)
        if event.kind == "start" and self._clock.sittings == 1:  # what came before was written only now
            time_before = time - self._clock.preparing
            self._began = time_before if self._began is None else min(self._began, time_before)
        self._began = time if self._began is None else self._began
        self._ended = time
        if event.kind == "step":
            self._take_step(seconds, event)
        elif event.kind == "speed":
            self._take_speed(seconds, event)
        else:
            self._moments.setdefault(event.kind, []).append(Moment(seconds, time, event))
        if event.kind == "start":
            self._go_on_from(int(event.data.get("first_step") or 0))

    def _take_step(self, seconds: float, event: Event) -> None:
        for name, values in event.data.get("values", {}).items():
            if values:
                x = _steps_of(len(values), event.step, event.step - self._last_step)
                self._values.setdefault(name, _Growing()).add(x, np.asarray(values, dtype=float))
        self._last_step = event.step
        if event.data.get("learning_rate") is not None:
            self._learning_rate.add(np.array([event.step], float), np.array([event.data["learning_rate"]], float))
        if event.data.get("examples_per_second") is not None:
            self._throughput.append((seconds, event.data["examples_per_second"]))

    def _take_speed(self, seconds: float, event: Event) -> None:
        if self._fresh:  # only now: a sitting that measured nothing leaves what the one before it did
            for worker in self._workers.values():
                worker.start(self._first_step)
            self._fresh = False
        self._workers.setdefault(int(event.data["rank"]), _WorkerReader(self._first_step)).take(seconds, event)

    def _go_on_from(self, step: int) -> None:
        self._first_step = self._last_step = step
        self._fresh = True
        self._moments.pop("end", None)
        for curve in (self._learning_rate, *self._values.values()):
            curve.rewind(step + 1)

    def history(self, run_dir: Path, rows: list[TableRow]) -> History:
        throughput = np.asarray(self._throughput, dtype=float).reshape(-1, 2)
        return History(
            run_dir=run_dir,
            run=_read_run(run_dir / "run.json"),
            rows=rows,
            values={name: growing.curve() for name, growing in self._values.items()},
            learning_rate=self._learning_rate.curve(),
            throughput=Curve(throughput[:, 0], throughput[:, 1]),
            workers=[reader.worker(rank) for rank, reader in sorted(self._workers.items()) if reader.seconds],
            plans=self._moments.get("plan", []),
            drifts=self._moments.get("drift", []),
            starts=self._moments.get("start", []),
            rollouts=self._moments.get("rollouts", []),
            evaluations=_without_repeats(self._moments.get("evaluation", [])),
            checkpoints=self._moments.get("checkpoint", []),
            faults=self._moments.get("fault", []),
            end=self._moments["end"][-1] if "end" in self._moments else None,
            began=self._began,
            ended=self._ended,
            seconds=self._clock.seconds,
            preparing=self._clock.preparing,
        )


def _steps_of(values: int, last: int, since: int) -> Floats:
    """Return the steps that this many values belong to: one each, up to the last; wider apart where there are fewer
    values than steps."""
    return last - np.arange(values, dtype=np.float64)[::-1] * max(1.0, since / values)


def _without_repeats(evaluations: list[Moment]) -> list[Moment]:
    """Leave out an evaluation that was repeated after going back, or at the end of the last epoch and at the end of the
    run: the later one counts."""
    kept: list[Moment] = []
    for moment in evaluations:
        while kept and kept[-1].event.step >= moment.event.step:
            kept.pop()
        kept.append(moment)
    return kept


def finite(curve: Curve) -> Curve:
    """Return the curve without the values that are not finite."""
    keep = np.isfinite(curve.y)
    return Curve(curve.x[keep], curve.y[keep])


def thinned(curve: Curve, buckets: int = 500) -> Curve:
    """Return the smallest and the largest value of each of this many stretches, in their order, so that no spike is
    lost.

    Values that are not finite stay as gaps.
    """
    if len(curve.x) <= 2 * buckets:
        return Curve(curve.x, np.where(np.isfinite(curve.y), curve.y, np.nan))
    kept: list[int] = []
    for part in np.array_split(np.arange(len(curve.x)), buckets):
        y = curve.y[part]
        bad = ~np.isfinite(y)
        picks = {int(part[np.argmax(bad)])} if bad.any() else set()
        if not bad.all():
            picks |= {int(part[np.argmin(np.where(bad, np.inf, y))]), int(part[np.argmax(np.where(bad, -np.inf, y))])}
        kept += sorted(picks)
    y = curve.y[kept]
    return Curve(curve.x[kept], np.where(np.isfinite(y), y, np.nan))


def smoothed(curve: Curve, points: int = 200) -> Curve:
    """Return the course of the finite values: means over stretches, then a weighted mean of the neighbouring ones."""
    curve = finite(curve)
    if len(curve.x) < 3:
        return curve
    parts = np.array_split(np.arange(len(curve.x)), min(points, len(curve.x)))
    starts = [int(part[0]) for part in parts]
    sizes = np.array([len(part) for part in parts], dtype=float)
    x = np.add.reduceat(curve.x, starts) / sizes
    return Curve(x, _weighted(np.add.reduceat(curve.y, starts) / sizes, reach=max(1, len(parts) // 40)))


def _weighted(y: Floats, reach: int) -> Floats:
    """Average each value with its neighbours, the near ones weighing more; at the ends with those that there are."""
    window = np.hanning(2 * reach + 3)[1:-1]
    return np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")


def spread(count: int, most: int) -> NDArray[np.intp]:
    """Return the indices of this many, or of ``most`` of them, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.intp))


def on_log_scale(curve: Curve) -> bool:
    """Report whether the course of positive values spans more than a factor of 30, so that a linear scale would hide
    its end."""
    y = finite(curve).y
    return len(y) > 2 and float(y.min()) > 0 and float(y.max()) / float(y.min()) > 30
