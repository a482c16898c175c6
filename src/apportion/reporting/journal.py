"""The events of a run, kept in files: ``events.jsonl``, TensorBoard, and the table at the end.

Every event is one line of JSON: ``kind``, ``step``, ``epoch``, ``seconds``, ``data`` as in ``Event``, and ``time``, the
wall clock in seconds since 1970. JSON has no numbers that are not finite; they are written as the strings "NaN",
"Infinity" and "-Infinity" (as protobuf's JSON does; ``float()`` takes them all), and read back as numbers.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from apportion.core.event import Event
from apportion.errors import CheckpointError
from apportion.reporting.loggers.tensorboard import Scalars
from apportion.runtime.checkpoint.durable_files import EVENTS, Appended, decode, encode, open_own, reason

REPORT = "report.html"
TENSORBOARD = "tensorboard"


class Journal:
    """Writes down every event of a run as it comes: to ``events.jsonl``, and for TensorBoard where it is installed.

    A resumed run goes on in the same files. Each line is handed to the operating system at once, so that a driver that
    is killed loses at most the line it was writing. A full disk ends nothing: it is warned of, and what finds no room
    is written when there is some. Raises CheckpointError where the run directory cannot be written for another reason.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._path = self._run_dir / EVENTS
        self._scalars = Scalars(self._run_dir / TENSORBOARD)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._lines = Appended(self._path, lambda line: decode(line) is not None)
        except OSError as error:
            raise self._refused(error) from error

    def write(self, event: Event) -> None:
        """Keep this event."""
        try:
            self._lines.write(encode(event))
            self._scalars.record(event)
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Close the files: no further event comes."""
        try:
            self._lines.close()
        except OSError as error:
            raise self._refused(error) from error
        finally:
            self._scalars.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write the events of the run to {self._path}: {reason(error)}; "
            f"{'remove it' if error.errno == errno.ELOOP else 'make room there'}, or choose another run directory"
        )


def read_events(run_dir: str | Path) -> list[Event]:
    """Read all events of a run, in order; of every sitting, where it was resumed."""
    return [event for _, event in entries(run_dir)]


def entries(run_dir: str | Path) -> Iterator[tuple[float, Event]]:
    """Read the events of a run one by one, each with the wall clock (seconds since 1970) when it was written.

    A torn last line, left by a driver that was killed, is passed over. Raises CheckpointError where any other line does
    not parse, or where there are no events at all.
    """
    path = Path(run_dir) / EVENTS
    try:
        file = open(open_own(path, os.O_RDONLY), "rb")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}; is {run_dir} the directory of a run?") from error
    with file:
        for number, line in enumerate(file, 1):
            entry = decode(line)
            if entry is not None:
                yield entry
            elif line.endswith(b"\n"):
                raise CheckpointError(f"{path}, line {number} is not an event: the file was changed or damaged")


@dataclass(frozen=True)
class TableRow:
    """One row of the table at the end of a run."""

    name: str
    """The name of the row, for example "test accuracy"."""
    value: float | int | str
    text: str
    """The value as a person reads it."""


def summary(events: Iterable[Event]) -> list[TableRow]:
    """Make the table at the end of a run: what it took, how far it got, and where the results are.

    Takes the events of a whole run, of one sitting, or of a run that ended early; rows of which nothing is known are
    left out.
    """
    last: dict[str, Event] = {}
    losses: dict[str, float] = {}
    clock = RunClock()
    metrics: dict[str, Any] = {}
    for event in events:
        clock.tick(event)
        last[event.kind] = event
        losses |= {name: values[-1] for name, values in event.data.get("values", {}).items() if values}
        metrics |= event.data.get("metrics") or {}
    rows = _progress(last, clock)
    rows += [TableRow(f"final {name}", value, measure(value)) for name, value in losses.items()]
    rows += [TableRow(f"test {name}", value, measure(value)) for name, value in metrics.items()]
    return rows + _written(last)


def _progress(last: Mapping[str, Event], clock: RunClock) -> list[TableRow]:
    if not last:
        return []
    steps, planned = clock.step, last["start"].data.get("steps") if "start" in last else None
    of_planned = f" of {planned:,}" if planned and planned != steps else ""
    sittings = f" in {clock.sittings} sittings" if clock.sittings > 1 else ""
    start = last["start"].data if "start" in last else {}
    of_example = int(start.get("frames") or 0)
    frames = steps * of_example * int(start.get("batch_size") or 0)
    rows = [
        TableRow("steps", steps, f"{steps:,}{of_planned}"),
        TableRow("frames", frames, f"{frames:,}") if frames else TableRow("epochs", clock.epoch, number(clock.epoch)),
        TableRow("time", clock.seconds, duration(clock.seconds) + sittings),
    ]
    if clock.preparing:
        rows.append(TableRow("preparation", clock.preparing, duration(clock.preparing)))
    speeds = [last[kind].data.get("examples_per_second") for kind in ("end", "step") if kind in last]
    what, per = ("frames/s", of_example) if frames else ("examples/s", 1)
    return rows + [TableRow(what, speed * per, number(speed * per)) for speed in speeds if speed][:1]


def _written(last: Mapping[str, Event]) -> list[TableRow]:
    rows = []
    if "checkpoint" in last:
        path = str(last["checkpoint"].data["path"])
        rows.append(TableRow("checkpoint", path, path))
    if "end" in last and last["end"].data.get("run_dir"):
        run_dir = Path(last["end"].data["run_dir"])
        names = [REPORT, TENSORBOARD] if (run_dir / TENSORBOARD).is_dir() else [REPORT]
        rows += [TableRow(Path(name).stem, str(run_dir / name), str(run_dir / name)) for name in names]
    return rows


class RunClock:
    """A clock of how far a run is, over all its sittings: ``seconds`` adds up the training, without the pauses between
    and without what comes before the first step of each (processes, data, the choice of a strategy, the proof), which
    ``preparing`` adds up."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0.0
        self.sittings = 0
        self.preparing = 0.0
        self._choosing = 0.0
        self._before = 0.0
        self._began = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._before + self._seconds

    def tick(self, event: Event) -> float:
        """Go on to this event, and return the seconds of training until it."""
        if event.kind == "plan":
            self._choosing += float(event.data.get("seconds") or 0.0)
        if event.kind in ("plan", "proof"):  # of the sitting that is about to start
            return self.seconds
        if event.kind == "start":
            self._before, self._seconds, self._began = self.seconds, 0.0, event.seconds
            self.preparing += event.seconds + self._choosing
            self._choosing = 0.0
            self.sittings += 1
        self.step, self.epoch = event.step, event.epoch
        self._seconds = max(self._seconds, event.seconds - self._began)
        return self._before + max(0.0, event.seconds - self._began)


def number(value: float) -> str:
    """Format a number with four significant digits, thousands apart: 0.9722, 12,345, 1.5e-07, nan."""
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:.4g}"


def measure(value: float) -> str:
    """Format a loss or a metric, with its decimals below each other where it is of the usual size: 0.9700, 12.3456."""
    return f"{value:.4f}" if 0.01 <= abs(value) < 1000 else number(value)


def duration(seconds: float) -> str:
    """Format seconds as a duration: 0.35 s, 12.3 s, 2 min 05 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
