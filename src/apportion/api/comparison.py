"""A comparison of strategies as text and as HTML: a table that fits 80 columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from apportion.core.html_table import html_table, html_text

if TYPE_CHECKING:
    from apportion.api.compare import ComparedRow

_WIDE = 120
"""The width of the output in columns, where it does not go to a terminal."""
_HEADS = ("workers", "step ms", "examples/s", "speed-up", "compute", "wait", "send", "exact", "MiB")


def show_rows(rows: Sequence[ComparedRow]) -> None:
    """Prints what ``compare`` measured."""
    console = Console(highlight=False, markup=False)
    _write(rows, console if console.is_terminal else Console(width=_WIDE, highlight=False, markup=False))


def rows_text(rows: Sequence[ComparedRow]) -> str:
    """Returns what ``compare`` measured, as the terminal shows it."""
    file = io.StringIO()
    _write(rows, Console(file=file, width=_WIDE, highlight=False, markup=False, force_jupyter=False))
    return file.getvalue().rstrip("\n")


def rows_html(rows: Sequence[ComparedRow]) -> str:
    """Returns what ``compare`` measured, as a notebook shows it."""
    return html_table(["strategy", *_HEADS], map(_cells, rows)) + html_text(" ".join(_LEGEND))


def _write(rows: Sequence[ComparedRow], console: Console) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("strategy", overflow="fold", min_width=13)
    for name in _HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
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


def _cells(row: ComparedRow) -> list[str]:
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
