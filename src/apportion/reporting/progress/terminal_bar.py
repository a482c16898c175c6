"""The bar of a run at a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from apportion.core.event import Event
from apportion.reporting.console import FrankConsole
from apportion.reporting.progress.plain_lines import PlainLines, place_text, speed_text, values_text


class ProgressBar(PlainLines):
    """A bar with the run's numbers, and a line for each worker."""

    def __init__(self, words: Callable[[str], str] = str) -> None:
        super().__init__(words)
        console = self._console = FrankConsole()
        self._progress = Progress(
            TextColumn("{task.fields[place]}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[values]}"),
            TextColumn("{task.fields[speed]}"),
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
        """Draws the bar."""
        self._live.start()

    def close(self) -> None:
        """Removes the bar."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line of words above the bar."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def show(self, event: Event) -> None:
        """Shows one more event."""
        data = event.data
        if event.kind == "start":
            self._task = self._progress.add_task(
                "train",
                total=data["steps"],
                completed=event.step,
                place=place_text(event, event),
                values="",
                speed=speed_text(0.0, event),
            )
        if event.kind == "step" and self._task is not None:
            self._progress.update(
                self._task,
                completed=event.step,
                place=place_text(event, self._start),
                values=values_text(event) + ("" if (score := self._score()) is None else f"  score {score:.2f}"),
                speed=speed_text(data["examples_per_second"], self._start),
            )
        elif event.kind == "speed":
            total = sum(data[part] for part in ("loading", "computing", "waiting", "updating")) or 1.0
            speed = speed_text(data["examples_per_second"], self._start)
            self._workers[data["rank"]] = f"{speed}, waiting {data['waiting'] / total:.0%} of the time"
        else:
            if event.kind == "fault":
                self._workers.clear()  # there may be fewer from now on
            super().show(event)
