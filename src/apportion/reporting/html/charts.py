"""The pictures of a run and of a plan: matplotlib's SVG, made to stand in a page and to take its colours and its type.

The only file that imports matplotlib. Figures are made without pyplot, and with matplotlib's
own defaults whatever style the user has set, so that a report written from a notebook changes nothing there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from apportion.reporting.html.history import (
    STAGES,
    Curve,
    History,
    Moment,
    WorkerHistory,
    finite,
    on_log_scale,
    smoothed,
    spread,
    thinned,
)
from apportion.reporting.journal import measure, number

BROAD, SLIM = 1000, 490
"""The widths of a broad and of a slim picture in pixels, at which the type has the size of the page's."""
SERIES = 8
"""The number of colours that can be distinguished; more workers than that are drawn as a band."""
MOST_BARS = 32

_COLOURS = ("ink", "muted", "grid", "surface", "bad", *(f"series-{n}" for n in range(1, SERIES + 1)))
MARKS = {name: f"#0{n:x}0b0c" for n, name in enumerate(_COLOURS)}
"""The colours to draw with, each a placeholder for one of the page's: light and dark are left to the style sheet."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font, and can be searched and read aloud
    "svg.hashsalt": "apportion",
    "text.parse_math": False,  # a metric may be called "$"
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": MARKS["muted"],
    "axes.labelcolor": MARKS["muted"],
    "axes.labelsize": 12,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0.015,
    "axes.unicode_minus": False,
    "grid.color": MARKS["grid"],
    "grid.linewidth": 1,
    "text.color": MARKS["ink"],
    "xtick.color": MARKS["muted"],
    "ytick.color": MARKS["muted"],
    "ytick.left": False,
    "lines.linewidth": 2,
    "lines.solid_joinstyle": "round",
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "savefig.transparent": True,
}


@dataclass(frozen=True)
class Picture:
    """An SVG element, and the keys to its colours: (what, the colour's name in the style sheet)."""

    svg: str
    keys: Sequence[tuple[str, str]] = ()


def value_picture(name: str, curve: Curve, *, wide: bool) -> Picture | None:
    """Draw a named value against the step: every value faint, and its course. None where no value is finite."""
    if not len(finite(curve).x):
        return None
    course, points = smoothed(curve), thinned(curve)

    def draw(axes: Axes) -> None:
        few = len(points.x) <= 60
        axes.plot(
            points.x,
            points.y,
            color=MARKS["series-1"],
            alpha=0.35,
            linewidth=1,
            marker="o" if few else "",
            markersize=3,
        )
        axes.plot(course.x, course.y, color=MARKS["series-1"], linewidth=2)
        if on_log_scale(course) and finite(curve).y.min() > 0:
            _log_scale(axes)
        _mark_not_finite(axes, curve)
        _steps(axes)
        _label_last(axes, course)

    keys = [("smoothed", "series-1"), ("each step", "series-1 faint")]
    if len(finite(curve).x) < len(curve.x):
        keys.append(("not finite", "bad"))
    what = f"{name} against the step"
    return Picture(broad_and_slim(one_plot(draw), what, 330) if wide else _slim(one_plot(draw), what, 280), keys)


def metric_picture(name: str, curve: Curve, best: int | None) -> Picture | None:
    """Draw a metric against the epoch. ``best``: the index of the value that is marked. None where no value is
    finite."""
    if not len(finite(curve).x):
        return None

    def draw(axes: Axes) -> None:
        axes.plot(curve.x, curve.y, color=MARKS["series-2"], marker="o", markersize=4 if len(curve.x) <= 60 else 0)
        if best is not None and np.isfinite(curve.y[best]):
            _mark_best(axes, curve, best)
        axes.margins(y=0.18)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))

    return Picture(_slim(one_plot(draw), f"{name} against the epoch", 280))


def scores_picture(curves: Sequence[tuple[str, Curve]], unit: str) -> Picture | None:
    """Draw scores against frames, or against time: the first curve faint, as what is drawn from it is. None where there
    is nothing to be drawn."""
    drawn = [(name, finite(curve)) for name, curve in curves if len(finite(curve).x)]
    if not drawn:
        return None
    colours = {name: f"series-{n}" for n, (name, _) in enumerate(curves, 1)}

    def draw(axes: Axes) -> None:
        for name, curve in drawn:
            first = name == curves[0][0]
            look: dict[str, Any] = {"alpha": 0.6, "linewidth": 1} if first else {"marker": "o", "markersize": 4}
            points = thinned(curve)
            axes.plot(points.x, points.y, color=MARKS[colours[name]], **look)
        axes.set_xlabel(unit)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))

    return Picture(_slim(one_plot(draw), f"score against {unit}", 280), [(name, colours[name]) for name, _ in drawn])


def learning_rate_picture(curve: Curve) -> Picture | None:
    """Draw the learning rate against the step; None where it does not change."""
    if len(finite(curve).x) < 2 or np.ptp(finite(curve).y) == 0:
        return None

    def draw(axes: Axes) -> None:
        points = thinned(curve)
        axes.plot(points.x, points.y, color=MARKS["series-5"])
        axes.set_ylim(bottom=0)
        _steps(axes)

    return Picture(_slim(one_plot(draw), "learning rate against the step", 280))


def speed_picture(history: History) -> Picture | None:
    """Draw the examples a second of each worker and of all, against time, above what happened then. None where there
    are too few values."""
    drawn = [worker for worker in history.workers if len(worker.speed.x) > 1]
    if not drawn and len(history.throughput.x) < 2:
        return None
    happened = [(name, moments) for name, moments in _happened(history).items() if moments]
    unit, per = _time_unit(history.seconds)

    panels: list[Callable[[Axes], None]] = []
    if len(history.throughput.x) > 1:
        panels.append(lambda axes: _draw_line(axes, history.throughput, per, "ink"))
    if len(drawn) > 1 or not panels:  # a lone worker's speed is the whole
        panels.append(lambda axes: _draw_workers(axes, drawn, per))

    def draw(figure: Figure) -> None:
        heights = [6.0] * len(panels) + [0.6 + len(happened)]
        *plots, strip = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        for axes, panel in zip(plots, panels, strict=True):
            panel(axes)
            _speeds(axes)
        _draw_strip(strip, happened, per)
        strip.set_xlabel(f"{unit} of training")
        strip.set_xlim(left=0)
        for moment in history.starts[1:]:
            for axes in (*plots, strip):
                axes.axvline(moment.seconds / per, color=MARKS["muted"], linewidth=1, dashes=(3, 3))

    what = "examples per second of each worker over time, with checkpoints, evaluations and faults"
    height = 70 + 160 * len(panels) + 24 * len(happened)
    return Picture(broad_and_slim(draw, what, height), _worker_keys(history, drawn) if len(drawn) > 1 else ())


def stages_picture(workers: Sequence[WorkerHistory]) -> Picture | None:
    """Draw where a step's time goes: a bar for each worker. None where no worker has such times."""
    workers = slowest([worker for worker in workers if worker.step_seconds > 0])
    if not workers:
        return None
    rows = np.arange(len(workers))

    def draw(axes: Axes) -> None:
        left = np.zeros(len(workers))
        for number_, stage in enumerate(STAGES, 1):
            widths = np.array([worker.stages.get(stage, 0.0) * 1e3 for worker in workers])
            bars = axes.barh(rows, widths, left=left, height=0.62, color=MARKS[f"series-{number_}"])
            for bar in bars:
                bar.set(edgecolor=MARKS["surface"], linewidth=1.5)
            left += widths
        for row, total in enumerate(left):
            axes.annotate(f"{number(total)} ms", (total, row), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(rows, [f"worker {worker.rank}" for worker in workers])
        axes.set_ylim(len(workers) - 0.4, -0.6)
        axes.set_xlim(0, float(left.max()) * 1.12)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(bottom=False)
        axes.set_xlabel("milliseconds a step")

    keys = [(stage, f"series-{n}") for n, stage in enumerate(STAGES, 1)]
    return Picture(broad_and_slim(one_plot(draw), "where a step's time goes, by worker", 70 + 34 * len(workers)), keys)


def slowest(workers: Sequence[WorkerHistory]) -> list[WorkerHistory]:
    """Return as many workers as there is room for: all, or those with the longest own work in a step (a fast worker
    waits)."""
    own = sorted(workers, key=lambda worker: worker.stages.get("waiting", 0.0) - worker.step_seconds)
    return sorted(own[:MOST_BARS], key=lambda worker: worker.rank)


def _speeds(axes: Axes) -> None:
    """Set the axis of speeds to start at zero, so that a small variation looks small."""
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y)))
    axes.tick_params(bottom=False)
    axes.spines["bottom"].set_visible(False)


def _draw_workers(axes: Axes, workers: Sequence[WorkerHistory], per: float) -> None:
    if len(workers) <= SERIES:
        for n, worker in enumerate(workers, 1):
            _draw_line(axes, worker.speed, per, f"series-{n}")
        return
    ends = [worker.speed.x[-1] for worker in workers]
    x = np.linspace(min(worker.speed.x[0] for worker in workers), max(ends), 200)
    y = np.array([np.interp(x, worker.speed.x, worker.speed.y) for worker in workers])
    axes.fill_between(x / per, y.min(0), y.max(0), color=MARKS["series-1"], alpha=0.2, linewidth=0)
    axes.plot(x / per, np.median(y, 0), color=MARKS["series-1"])


def _worker_keys(history: History, workers: Sequence[WorkerHistory]) -> list[tuple[str, str]]:
    keys = [("all workers", "ink")] if len(history.throughput.x) > 1 else []
    if len(workers) > SERIES:
        between = [("median worker", "series-1"), (f"slowest to fastest of {len(workers)}", "series-1 faint")]
        return keys + between
    return keys + [(f"worker {worker.rank}", f"series-{n}") for n, worker in enumerate(workers, 1)]


def _draw_line(axes: Axes, curve: Curve, per: float, colour: str) -> None:
    points = thinned(curve)
    axes.plot(points.x / per, points.y, color=MARKS[colour], linewidth=1.5)


def _happened(history: History) -> dict[str, list[Moment]]:
    return {"faults": history.faults, "evaluations": history.evaluations, "checkpoints": history.checkpoints}


def _draw_strip(axes: Axes, happened: Sequence[tuple[str, list[Moment]]], per: float) -> None:
    """Draw a row of marks for each kind of event."""
    look = {"faults": ("bad", "X", 7), "evaluations": ("series-2", "o", 5), "checkpoints": ("muted", "|", 8)}
    for row, (name, moments) in enumerate(happened):
        colour, marker, size = look[name]
        x = [moment.seconds / per for moment in moments]
        axes.plot(x, [row] * len(x), marker, color=MARKS[colour], markersize=size, linestyle="none", clip_on=False)
    axes.set_yticks(range(len(happened)), [name for name, _ in happened])
    axes.set_ylim(len(happened) - 0.4, -0.6)
    axes.grid(visible=False)


def _mark_best(axes: Axes, curve: Curve, best: int) -> None:
    x, y = float(curve.x[best]), float(curve.y[best])
    axes.plot([x], [y], "o", markersize=9, color=MARKS["series-2"], markeredgecolor=MARKS["surface"], markeredgewidth=2)
    _annotate(axes, f"best {measure(y)}", x, y, below=y < float(np.nanmedian(curve.y)))


def _label_last(axes: Axes, course: Curve) -> None:
    _annotate(axes, measure(float(course.y[-1])), float(course.x[-1]), float(course.y[-1]))


def _annotate(axes: Axes, text: str, x: float, y: float, *, below: bool = False) -> None:
    """Write a text beside a point, on the side where there is room."""
    low, high = axes.get_xlim()
    late = x > (low + high) / 2
    offset = (-8 if late else 8, -9 if below else 9)
    ha, va = "right" if late else "left", "top" if below else "bottom"
    axes.annotate(text, (x, y), offset, textcoords="offset points", ha=ha, va=va, weight="bold")


def _mark_not_finite(axes: Axes, curve: Curve) -> None:
    """Draw ticks along the upper edge, at the values that are not finite."""
    bad = curve.x[~np.isfinite(curve.y)]
    if len(bad):
        bad = bad[spread(len(bad), 500)]
        look: dict[str, Any] = {"color": MARKS["bad"], "markersize": 10, "clip_on": False}
        axes.plot(bad, np.ones(len(bad)), "|", transform=axes.get_xaxis_transform(), **look)


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 300 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", left=False)


def _steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, per in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds > 3 * per:
            return unit, per
    return "seconds", 1.0


def one_plot(draw: Callable[[Axes], None]) -> Callable[[Figure], None]:
    """Return a function that draws a figure of one plot."""
    return lambda figure: draw(figure.subplots())


def broad_and_slim(draw: Callable[[Figure], None], what: str, height: int) -> str:
    """Draw the figure twice, for a wide and for a narrow screen: the style sheet shows the one that fits."""
    return _figure(draw, what, (BROAD, height), "broad") + _figure(draw, what, (SLIM, height), "slim")


def _slim(draw: Callable[[Figure], None], what: str, height: int) -> str:
    return _figure(draw, what, (SLIM, height), "")


def _figure(draw: Callable[[Figure], None], what: str, pixels: tuple[int, int], shown: str) -> str:
    file = io.StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(pixels[0] / 72, pixels[1] / 72), dpi=72, layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    return _for_the_page(file.getvalue(), what, shown)


def _for_the_page(svg: str, what: str, shown: str) -> str:
    """Return the SVG element alone, with a label for screen readers, in the page's colours and type, with ids of its
    own."""
    svg = svg[svg.index("<svg") :]
    for name, mark in MARKS.items():
        svg = svg.replace(mark, f"var(--{name})")
    svg = re.sub(r"font: ((?:\w+ )*)([\d.]+)px [^;\"]*", lambda m: f"font: {m[1]}{m[2]}px var(--type)", svg)
    svg = svg.replace("xlink:href", "href")
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    element = f'<svg class="{shown}" viewBox="{box[1]}" role="img" aria-label="{escape(what)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: element, svg, count=1)
    return _with_own_ids(svg, prefix=re.sub(r"\W+", "-", f"{what} {shown}"))


def _with_own_ids(svg: str, prefix: str) -> str:
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", svg)


TERMS = ("computing", "updating", "loading", "communicating", "bubble", "waiting")
MOST_CANDIDATES = 14
MOST_ROWS = 24
"""The largest number of devices and links in the timeline."""
TERM_COLOURS = {term: f"series-{n}" for n, term in enumerate(TERMS, 1)}


def terms_picture(candidates: Sequence[Mapping[str, Any]], batch_size: int) -> Picture | None:
    """Draw a bar for each candidate: predicted seconds for one batch by term, and a mark at what was measured. None
    where there are no candidates."""
    shown = candidates[:MOST_CANDIDATES]
    if not shown:
        return None
    rows = np.arange(len(shown))
    per_batch = np.array([batch_size / c["examples"] for c in shown]) * 1e3
    measured = [(i, c["measured"]["step_seconds"] * per_batch[i]) for i, c in enumerate(shown) if c["measured"]]

    def draw(axes: Axes) -> None:
        left = np.zeros(len(shown))
        for term, colour in TERM_COLOURS.items():
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

    keys = [(term, colour) for term, colour in TERM_COLOURS.items() if any(c["terms"][term] for c in shown)]
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
        for kind, colour in TERM_COLOURS.items():
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

    keys = [(kind, colour) for kind, colour in TERM_COLOURS.items() if any(s["kind"] == kind for s in spans)]
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
