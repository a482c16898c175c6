"""The pictures of a plan: strategies by what their time goes to, predicted beside measured; one step by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from apportion.reporting.html.run_charts import MARKS, Picture, broad_and_slim, one_plot
from apportion.reporting.journal import number

TERMS = ("computing", "updating", "loading", "communicating", "bubble", "waiting")
MOST_BARS = 14
MOST_ROWS = 24
"""The largest number of devices and links in the timeline."""
_COLOURS = {term: f"series-{n}" for n, term in enumerate(TERMS, 1)}


def terms_picture(candidates: Sequence[Mapping[str, Any]], batch_size: int) -> Picture | None:
    """Draw a bar for each candidate: predicted seconds for one batch by term, and a mark at what was measured. None
    where there are no candidates."""
    shown = candidates[:MOST_BARS]
    if not shown:
        return None
    rows = np.arange(len(shown))
    per_batch = np.array([batch_size / c["examples"] for c in shown]) * 1e3
    measured = [(i, c["measured"]["step_seconds"] * per_batch[i]) for i, c in enumerate(shown) if c["measured"]]

    def draw(axes: Axes) -> None:
        left = np.zeros(len(shown))
        for term, colour in _COLOURS.items():
            widths = np.array([c["terms"][term] for c in shown]) * per_batch
            for bar in axes.barh(rows, widths, left=left, height=0.62, color=MARKS[colour]):
                bar.set(edgecolor=MARKS["surface"], linewidth=1.5)
            left += widths
        for row, total in enumerate(left):
            axes.annotate(f"{number(total)} ms", (total, row), (6, 0), textcoords="offset points", va="center")
        for row, seconds in measured:
            axes.plot([seconds] * 2, [row - 0.42, row + 0.42], color=MARKS["ink"], linewidth=3)
        axes.set_yticks(rows, [_name(c) for c in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, max([float(left.max()), *(s for _, s in measured)]) * 1.14)
        _across(axes)

    keys = [(term, colour) for term, colour in _COLOURS.items() if any(c["terms"][term] for c in shown)]
    if measured:
        keys.append(("measured", "ink"))
    what = "milliseconds for one batch by what they go to, by strategy"
    return Picture(broad_and_slim(one_plot(draw), what, 70 + 44 * len(shown)), keys)


def timeline_picture(spans: Sequence[Mapping[str, Any]]) -> Picture | None:
    """Draw one step: a row for each device or link, a stretch for each thing that it does. None where there are no
    spans."""
    names = list(dict.fromkeys(span["on"] for span in spans))[:MOST_ROWS]
    if not names:
        return None
    at = {name: row for row, name in enumerate(names)}

    def draw(axes: Axes) -> None:
        for kind, colour in _COLOURS.items():
            own = [s for s in spans if s["kind"] == kind and s["on"] in at]
            axes.barh(
                [at[s["on"]] for s in own],
                [(s["end"] - s["begin"]) * 1e3 for s in own],
                left=[s["begin"] * 1e3 for s in own],
                height=0.7,
                color=MARKS[colour],
                edgecolor=MARKS["surface"],
                linewidth=0.8,
            )
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(left=0)
        _across(axes)

    keys = [(kind, colour) for kind, colour in _COLOURS.items() if any(s["kind"] == kind for s in spans)]
    return Picture(broad_and_slim(one_plot(draw), "one step by device and link", 70 + 30 * len(names)), keys)


def _name(candidate: Mapping[str, Any]) -> str:
    """Return the text beside a bar, without the launcher, which is in the table."""
    text, many = candidate["strategy"], candidate["workers"]
    short = text if len(text) <= 44 else f"{text[:42]}.."
    return f"{short}\n{many} worker{'' if many == 1 else 's'} x {candidate['threads']}"


def _across(axes: Axes) -> None:
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(bottom=False)
    axes.set_xlabel("milliseconds")
