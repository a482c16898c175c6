"""A run on the terminal: a bar while it goes, plain lines without a terminal, the numbers at the end."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from apportion.cli.plain_lines import PlainLines
from apportion.core.event import Event
from apportion.reporting.journal import summary


class Display:
    """Shows the events of one run."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lines = PlainLines()
        if _is_terminal():
            from apportion.cli.progress_bar import ProgressBar  # rich takes a tenth of the time that torch takes

            self._lines = ProgressBar()

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


def _is_terminal() -> bool:
    """Tells whether standard output is a terminal, or is to be taken for one."""
    return (sys.stdout is not None and sys.stdout.isatty()) or bool(os.environ.get("FORCE_COLOR"))
