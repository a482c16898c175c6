"""The bar of a run in a notebook: one output of the cell, which is drawn anew as the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from typing import Any

from apportion.core.event import Event
from apportion.reporting.progress.plain_lines import PlainLines, place_text, speed_text, values_text

DRAW_SECONDS = 0.25
"""The seconds between two drawings: each is sent to the browser."""
FIRST_LINES, MOST_LINES = 4, 12
"""The number of lines at the beginning that stay, which say what runs, and that of all lines that are shown."""


class NotebookBar(PlainLines):
    """Shows the lines that stay, and below them the bar with the run's numbers."""

    def __init__(self, words: Callable[[str], str] = str) -> None:
        super().__init__(words)
        self._said: list[str] = []
        self._last: Event | None = None
        self._drawn = 0.0
        self._output: Any = None

    def open(self) -> None:
        from IPython.display import display

        self._output = display({"text/plain": ""}, raw=True, display_id=True)

    def close(self) -> None:
        self._draw(ends=True)

    def say(self, text: str) -> None:
        self._said.append(text)
        if len(self._said) > MOST_LINES:
            del self._said[FIRST_LINES]
        self._draw()

    def show(self, event: Event) -> None:
        if event.kind == "step":
            self._last = event
            if time.monotonic() >= self._drawn + DRAW_SECONDS:
                self._draw()
            return
        super().show(event)

    def _draw(self, *, ends: bool = False) -> None:
        if self._output is None:
            return
        self._drawn = time.monotonic()
        lines, html = [*self._said], [f"<div>{escape(line)}</div>" for line in self._said]
        if self._last is not None and self._start is not None:
            total, done = self._start.data["steps"], self._last.step
            numbers = (
                f"{place_text(self._last, self._start)}, step {done:,} of {total:,}  {values_text(self._last)}  "
                f"{speed_text(self._last.data['examples_per_second'], self._start)}"
            )
            lines.append(numbers)
            bar = f'<progress value="{done}" max="{max(total, 1)}" style="width:20em"></progress> '
            html.append(f"<div>{'' if ends else bar}{escape(numbers)}</div>")
        content = {"text/plain": "\n".join(lines), "text/html": f"<div>{''.join(html)}</div>"}
        self._output.update(content, raw=True)
