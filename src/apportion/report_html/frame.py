"""What every page is put together from: the document, its sections, figures and tables that can be opened."""

from __future__ import annotations

from html import escape
from types import ModuleType
from typing import TYPE_CHECKING

from apportion.report_html.style import STYLE

if TYPE_CHECKING:
    from apportion.report_html.pictures import Picture

# Whatever a text in the run may hold, no browser fetches or runs anything for this page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, body: str) -> str:
    """The whole file."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def drawing() -> ModuleType | None:
    """What draws; None where matplotlib is not installed."""
    try:
        from apportion.report_html import pictures
    except ImportError:
        return None
    return pictures


def without_pictures(pictures: ModuleType | None) -> str:
    """What is said where nothing draws."""
    if pictures is not None:
        return ""
    return section(
        "Without pictures",
        '<p class="note">The curves are drawn with matplotlib, which is not installed: '
        "<code>pip install &quot;apportion[report]&quot;</code></p>",
    )


def section(title: str, html: str) -> str:
    """A part of the page with a heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{html}\n</section>"


def figure(picture: Picture | None, title: str) -> str:
    """A picture with the keys to its colours; nothing where there is none."""
    if picture is None:
        return ""
    keys = "".join(
        f'<span><i class="{_faint(colour)}" style="background:var(--{colour.split()[0]})"></i>{escape(what)}</span>'
        for what, colour in picture.keys
    )
    head = f"<h3>{escape(title)}</h3>" if title else ""
    caption = f'<figcaption>{head}<span class="keys">{keys}</span></figcaption>' if head or keys else ""
    return f"<figure>{caption}{picture.svg}</figure>"


def _faint(colour: str) -> str:
    return "faint" if colour.endswith(" faint") else ""


def pair(parts: list[str]) -> str:
    """Side by side, where there is room."""
    cells = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="pair">{cells}</div>' if cells else ""


def numbers(title: str, html: str, *, shown: bool) -> str:
    """A table to be opened by who wants it; open where it stands in for a picture."""
    return f"<details{' open' if shown else ''}><summary>{escape(title)}</summary>{html}</details>"
