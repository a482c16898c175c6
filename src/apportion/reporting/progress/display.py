"""A run as it is shown: a bar on a terminal or in a notebook, plain lines elsewhere, and the numbers at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from apportion.core.event import Event
from apportion.reporting.journal import summary
from apportion.reporting.progress.plain_lines import PlainLines


class Display:
    """Shows the events of one run."""

    def __init__(self, words: Callable[[str], str] = str) -> None:
        """``words``: what is made of a message before it is shown, as its arguments written as flags."""
        self._events: list[Event] = []
        self._lines = PlainLines(words)
        if in_notebook():
            from apportion.reporting.progress.notebook_bar import NotebookBar

            self._lines = NotebookBar(words)
        elif on_terminal():
            from apportion.reporting.progress.terminal_bar import ProgressBar  # rich takes a tenth of torch's time

            self._lines = ProgressBar(words)

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


def in_notebook() -> bool:
    """Tells whether this process is the kernel of a notebook, whose output a browser shows."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


def on_terminal() -> bool:
    """Tells whether standard output is a terminal, or is to be taken for one."""
    return (sys.stdout is not None and sys.stdout.isatty()) or bool(os.environ.get("FORCE_COLOR"))
