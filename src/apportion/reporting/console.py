"""The console that text is printed to."""

from __future__ import annotations

from rich.console import Console


class FrankConsole(Console):
    """A console that leaves a closed pipe to the caller: rich's own answer is to leave with exit status 1."""

    def on_broken_pipe(self) -> None:
        raise
