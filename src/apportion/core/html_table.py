"""Tables in HTML, as a notebook shows results: without scripts and style sheets, so that they look the same wherever
the notebook is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_TEXT, _NUMBER = "text-align:left", "text-align:right"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells of the first column are texts, and those of the others stand at the right."""
    aligned = [_TEXT, *[_NUMBER] * (len(heads) - 1)]
    head = "".join(f'<th style="{style}">{escape(name)}</th>' for name, style in zip(heads, aligned, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{style}">{_lines(cell)}</td>' for cell, style in zip(row, aligned, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(facts: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    rows = "".join(
        f'<tr><th style="{_TEXT}">{escape(name)}</th><td style="{_TEXT}">{_lines(value)}</td></tr>'
        for name, value in facts
    )
    return f"<table><tbody>{rows}</tbody></table>"


def html_section(title: str, lines: Iterable[str]) -> str:
    """A heading and lines below it; empty where there are no lines."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<p><b>{escape(title)}</b></p><ul>{items}</ul>" if items else ""


def html_text(text: str, *, bold: bool = False) -> str:
    """A paragraph of this text."""
    return f"<p>{f'<b>{escape(text)}</b>' if bold else escape(text)}</p>"


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
