"""A run on the terminal: a bar while it goes, plain lines where there is no terminal, tables at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from apportion.core.event import Event
from apportion.reporting.journal import summary

if TYPE_CHECKING:
    from apportion.api.compared_row import ComparedRow
    from apportion.runtime.proof.proof import Proof, Round

LINE_SECONDS = 2.0
"""The seconds between two plain lines of a kind."""


class _Console(Console):
    """A console that leaves a closed pipe to the caller: rich's own answer is to leave with exit status 1."""

    def on_broken_pipe(self) -> None:
        raise


class Display:
    """Shows the events of one run."""

    def __init__(self) -> None:
        self._console = _Console()
        self._events: list[Event] = []
        self._lines = _Bar(self._console) if self._console.is_terminal else _Lines(self._console)

    def __enter__(self) -> Display:
        self._lines.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def say(self, text: str) -> None:
        """Prints a line of words."""
        self._lines.say(text)

    def show(self, event: Event) -> None:
        """Shows one more event of the run."""
        if event.kind in ("start", "step"):  # of the many, the last
            self._events = [e for e in self._events if e.kind != event.kind]
        if event.kind != "speed":
            self._events.append(event)
        self._lines.show(event)

    def summarize(self) -> None:
        """Prints the table at the end, the metrics, and where everything is; nothing on a rank other than the first of
        those that others have started, which has not seen the whole run."""
        if all(event.kind != "start" for event in self._events):
            return
        rows = summary(self._events)
        width = max(len(row.name) for row in rows)
        for row in rows:
            if not row.name.startswith("test "):
                self.say(f"{row.name:{width}}  {row.text}")
        for row in rows:
            if row.name.startswith("test "):
                self.say(f"{row.name} {row.value:.3f}")


class _Lines:
    """Shows one plain line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._start: Event | None = None

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def show(self, event: Event) -> None:
        now = time.monotonic()
        if event.kind == "plan":
            self.say(plan_line(event))
        elif event.kind == "proof":
            self.say(event.data["sentence"])
        elif event.kind == "start":
            self._start = event
            self.say(start_line(event))
        elif event.kind == "step" and now >= self._next:
            self.say(step_line(event, self._start))
            self._next = now + LINE_SECONDS
        elif event.kind == "evaluation":
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.data["metrics"].items())
            self.say(f"epoch {event.epoch:.2f}  test {metrics}")
        elif event.kind == "drift":
            self.say(f"step {event.step}: {event.data['cause']}")
        elif event.kind == "fault" and event.data["action"] != "stops":  # that is told as the error that it ends with
            self.say(f"fault: {event.data['cause']} ({event.data['action']})")


class _Bar(_Lines):
    """A bar with the run's numbers, and a line for each worker."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]:.2f}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[values]}"),
            TextColumn("{task.fields[speed]:,.0f} examples/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._workers: dict[int, str] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def _render(self) -> Group:
        workers = [Text(f"worker {rank}: {text}", style="dim") for rank, text in sorted(self._workers.items())]
        return Group(self._progress, *workers)

    def open(self) -> None:
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        data = event.data
        if event.kind == "start":
            self._task = self._progress.add_task(
                "train", total=data["steps"], completed=event.step, epoch=event.epoch, values="", speed=0.0
            )
        if event.kind == "step" and self._task is not None:
            self._progress.update(
                self._task,
                completed=event.step,
                epoch=event.epoch,
                values=_values(event),
                speed=data["examples_per_second"],
            )
        elif event.kind == "speed":
            total = sum(data[part] for part in ("loading", "computing", "waiting", "updating")) or 1.0
            self._workers[data["rank"]] = (
                f"{data['examples_per_second']:,.0f} examples/s, waiting {data['waiting'] / total:.0%} of the time"
            )
        else:
            if event.kind == "fault":
                self._workers.clear()  # there may be fewer from now on
            super().show(event)


def plan_line(event: Event) -> str:
    """Returns a line on what is taken, why, and how long the steps of the others took."""
    data = event.data
    taken = data["strategy"], data["launcher"]
    others = [
        f"{other['strategy']} on {other['launcher']}: {told}"
        for other in data["candidates"]
        if (other["strategy"], other["launcher"]) != taken and (told := _tried(other))
    ]
    return f"{taken[0]} on {taken[1]}: {data['why']}" + (f" ({'; '.join(others)})" if others else "")


def _tried(candidate: Mapping[str, Any]) -> str:
    """Returns how the trial of a candidate went; empty where it was not tried."""
    if candidate["refused"] is not None:
        return str(candidate["refused"])
    return "" if candidate["step_seconds"] is None else f"{candidate['step_seconds'] * 1e3:.3g} ms"


def start_line(event: Event) -> str:
    """Returns a line on what is about to run."""
    data = event.data
    resumed = f", resumed at step {data['first_step']}" if data["resumed"] else ""
    return (
        f"{data['strategy']} on {data['launcher']} ({data['device']}): {data['parameters']:,} parameters, "
        f"{data['examples']:,} examples, batches of {data['batch_size']}, {data['steps']:,} steps{resumed}"
    )


def step_line(event: Event, start: Event | None) -> str:
    """Returns a line on how far the run is."""
    total = f"/{start.data['steps']}" if start is not None else ""
    return (
        f"epoch {event.epoch:.2f}  step {event.step}{total}  {_values(event)}  "
        f"{event.data['examples_per_second']:,.0f} examples/s"
    )


def _values(event: Event) -> str:
    return "  ".join(f"{name} {values[-1]:.4f}" for name, values in event.data["values"].items() if values)


def show_proof(proof: Proof) -> None:
    """Prints what ``check`` found, in words."""
    console = _Console(soft_wrap=True, highlight=False, markup=False)
    whose = "one device" if proof.exact else "its own reference (it is approximate by design)"
    console.print(f"{proof.strategy} on {proof.workers} workers against {whose}:")
    for found in proof.rounds:
        console.print(_round_line(found))
    for line in proof.by_design:
        console.print(f"  by design: {line}")
    if proof.gradients is not None:
        console.print(_round_line(proof.gradients, "gradients in "))
    if proof.first is not None:
        console.print(f"  {proof.first}")
    for line in proof.causes:
        console.print(f"  likely: {line}")
    verdicts = {"equal": "the same network", "different": "NOT the same network", "undecided": "UNDECIDED"}
    console.print(proof.sentence)
    console.print(verdicts[proof.verdict])


def _round_line(found: Round, what: str = "") -> str:
    worst = found.worst
    verdict = {"equal": "equal", "different": "DIFFERENT", "undecided": "UNDECIDED"}[found.verdict]
    line = (
        f"  {what}{found.precision}: {verdict} over {found.steps} steps and {found.tensors} tensors; worst is "
        f"{worst.name} after step {worst.step}, by {worst.absolute:.2g}, {worst.relative:.2g} of the largest change "
        f"(bound {found.bound:.2g}, rounding noise {found.noise:.2g})"
    )
    return line if found.disagreement is None else f"{line}\n    {found.disagreement}"


def show_rows(rows: Sequence[ComparedRow]) -> None:
    """Prints what ``compare`` measured, as a table that fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("strategy", overflow="fold", min_width=13)
    for name in (
        "workers",
        "step ms",
        "examples/s",
        "speed-up",
        "compute",
        "wait",
        "send",
        "exact",
        "MiB",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(width=120, highlight=False, markup=False)
    console.print(table)
    for line in _LEGEND:
        console.print(line, style="dim")


_LEGEND = (
    "workers: processes x threads; step: the median; ~ predicted before it ran, and",
    "by how much it took longer than that; speed-up: over single_device",
    "compute, wait (for others), send: shares of the time",
    "MiB: weights, slots, buffers of all",
)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size >= 10 << 20 else f"{size / 2**20:.2g}"


def _step(row: ComparedRow) -> str:
    """Returns the milliseconds of a step; below them what was predicted, and by how much the step takes longer than
    that."""
    measured = f"{row.step_seconds * 1e3:.3g}"
    if row.predicted_seconds is None:
        return measured
    return f"{measured}\n~{row.predicted_seconds * 1e3:.3g}\n{row.error:+.0%}"


def _cells(row: ComparedRow) -> list[Any]:
    return [
        row.strategy.replace("(", "\n("),
        f"{row.workers} x {row.threads}",
        _step(row),
        f"{row.examples_per_second:,.0f}",
        f"{row.times_one_device:.2f}",
        f"{row.computing:.0%}",
        f"{row.waiting:.0%}",
        f"{row.communicating:.0%}",
        "yes" if row.exact else "no",
        _mebibytes(row.held_bytes),
    ]
