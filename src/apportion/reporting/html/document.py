"""The building blocks of every page: the document, its sections, figures and tables that can be opened."""

from __future__ import annotations

from html import escape
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apportion.reporting.html.charts import Picture


# Whatever a text in the run may hold, no browser fetches or runs anything for this page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, body: str) -> str:
    """Return the whole HTML file."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def drawing() -> ModuleType | None:
    """Return the module that draws; None where matplotlib is not installed."""
    try:
        from apportion.reporting.html import charts
    except ImportError:
        return None
    return charts


def without_pictures(charts: ModuleType | None) -> str:
    """Return the note on missing pictures; empty where they can be drawn."""
    if charts is not None:
        return ""
    return section(
        "Without pictures",
        '<p class="note">The curves are drawn with matplotlib, which is not installed: '
        "<code>pip install &quot;.[report]&quot;</code> in a clone of apportion</p>",
    )


def section(title: str, html: str) -> str:
    """Return a section of the page with a heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{html}\n</section>"


def figure(picture: Picture | None, title: str) -> str:
    """Return a picture with the keys to its colours; empty where there is none."""
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
    """Place the parts side by side, where there is room."""
    cells = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="pair">{cells}</div>' if cells else ""


def numbers(title: str, html: str, *, shown: bool) -> str:
    """Return a table that a reader can open; it is open at first where it stands in for a picture."""
    return f"<details{' open' if shown else ''}><summary>{escape(title)}</summary>{html}</details>"


# The style: light and dark, wide and narrow, and on paper


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f5f1; --surface: #ffffff; --ink: #161614; --soft: #52514e; --muted: #7a7872; --grid: #e6e4dd;
  --good: #0a7d37; --warn: #9a5b00; --bad: #c8322f;
  --series-1: #2a78d6; --series-2: #12976a; --series-3: #d98c00; --series-4: #6a51c4;
  --series-5: #c2478a; --series-6: #d95c22; --series-7: #4c8c1c; --series-8: #1797a6;
  --type: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121211; --surface: #1c1c1a; --ink: #f3f2ee; --soft: #c3c2b7; --muted: #969489; --grid: #32322f;
    --good: #4cc27c; --warn: #e3a549; --bad: #f0706c;
    --series-1: #4a94ea; --series-2: #25ad7e; --series-3: #d39a1f; --series-4: #9585ee;
    --series-5: #dc6ba8; --series-6: #e57a48; --series-7: #7db648; --series-8: #3fb3c1;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 var(--type); }
main { max-width: 1090px; margin: 0 auto; padding: 2.6rem 1.25rem 4rem; }
h1 { font: 600 1.75rem/1.25 var(--type); letter-spacing: -.015em; margin: .2rem 0 .5rem; overflow-wrap: anywhere; }
h2 { font: 600 1.06rem/1.3 var(--type); margin: 0 0 .2rem; }
h3 { font: 600 .93rem/1.3 var(--type); margin: 0; overflow-wrap: anywhere; }
p { margin: .25rem 0; color: var(--soft); max-width: 46rem; }
code, pre { font: .87em/1.5 var(--mono); }
.over { color: var(--muted); font-size: .87rem; margin: 0; }
.state { font-weight: 600; }
.state.good { color: var(--good); } .state.warn { color: var(--warn); } .state.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; margin: 1.6rem 0 0;
  background: var(--grid); border: 1px solid var(--grid); border-radius: 10px; overflow: hidden; }
.tiles div { background: var(--surface); padding: .85rem 1.1rem .95rem; }
.tiles dt { color: var(--muted); font-size: .85rem; overflow-wrap: anywhere; }
.tiles dd { margin: 0; font-size: 1.5rem; font-weight: 600; line-height: 1.25; letter-spacing: -.01em; }
section { background: var(--surface); border: 1px solid var(--grid); border-radius: 10px;
  padding: 1.15rem 1.25rem 1.25rem; margin: 1.1rem 0 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: .8rem 1.5rem; margin: 0; }
h2 + .facts { margin-top: .5rem; }
.facts dt { color: var(--muted); font-size: .85rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 1.1rem 1.5rem; }
figure { margin: .7rem 0 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg.slim { display: none; }
figure svg text { paint-order: stroke; stroke: var(--surface); stroke-width: 3px; stroke-linejoin: round; }
figcaption, .keys { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; align-items: baseline; }
.keys { color: var(--soft); font-size: .87rem; }
.keys i { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .42em;
  vertical-align: -.06em; }
.keys i.faint { opacity: .4; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; margin-top: .5rem; }
th { color: var(--muted); font-weight: 500; font-size: .85rem; }
th, td { padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; } .text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
details { margin-top: .7rem; }
summary { cursor: pointer; color: var(--soft); font-size: .87rem; width: fit-content; }
summary:hover { color: var(--ink); }
pre { overflow-x: auto; background: var(--page); border: 1px solid var(--grid); border-radius: 8px; padding: .8rem 1rem;
  margin: .5rem 0 0; }
.fault { border-left: 3px solid var(--bad); padding-left: .9rem; margin-top: .9rem; }
.fault p { overflow-wrap: anywhere; }
.note { border-left: 3px solid var(--warn); padding-left: .9rem; }
footer { color: var(--muted); font-size: .85rem; margin-top: 1.4rem; }
@media (max-width: 700px) {
  main { padding: 1.5rem .8rem 3rem; } section { padding: 1rem; } h1 { font-size: 1.4rem; }
  .facts { grid-template-columns: 1fr 1fr; }
  figure svg.broad { display: none; } figure svg.slim { display: block; }
}
@media print { body { background: none; } section, .tiles { break-inside: avoid; } main { padding: 0; } }
"""
