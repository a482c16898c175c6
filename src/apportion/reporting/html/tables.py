"""The report in numbers: plain HTML tables, all text escaped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from apportion.core.event import EPISODE
from apportion.reporting.html.history import STAGES, Curve, History, Moment, finite, spread
from apportion.reporting.journal import duration, measure, number

MOST_ROWS = 24


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table of texts; its first ``texts`` columns are aligned left, the others are numbers."""
    kind = ["text"] * texts + ["number"] * (len(heads) - texts)
    head = "".join(f'<th class="{k}" scope="col">{escape(cell)}</th>' for k, cell in zip(kind, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{k}">{escape(cell)}</td>' for k, cell in zip(kind, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and what they stand for."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>\n" for name, text in pairs if text)
    return f'<dl class="facts">\n{cells}</dl>' if cells else ""


def values_table(curve: Curve) -> str:
    """Return the table of a named value, at steps through the whole run."""
    rows = [(f"{curve.x[i]:,.0f}", measure(float(curve.y[i]))) for i in spread(len(curve.x), MOST_ROWS)]
    return table(["step", "value"], rows, texts=0)


def metrics_table(history: History) -> str:
    """Return the table of each metric: the last value, and the value at the evaluation that was the best."""
    last = _metrics(history.evaluations[-1]) if history.evaluations else {}
    if history.end is not None:
        last = {**last, **(history.end.event.data.get("metrics") or {})}
    if not last:
        return ""
    best = best_of(history.evaluations)
    if best is None:
        return table(["metric", "last"], [(f"test {name}", measure(value)) for name, value in last.items()])
    found, epoch = _metrics(history.evaluations[best]), number(history.evaluations[best].event.epoch)
    rows = [
        (f"test {name}", measure(value), measure(found[name]) if name in found else "", epoch)
        for name, value in last.items()
    ]
    return table(["metric", "last", "at the best", "epoch"], rows)


def evaluations_table(evaluations: Sequence[Moment]) -> str:
    """Return the table of every evaluation, or of as many as are readable."""
    names = list(dict.fromkeys(name for moment in evaluations for name in _metrics(moment)))
    rows = []
    for i in spread(len(evaluations), 4 * MOST_ROWS):
        event, metrics = evaluations[i].event, _metrics(evaluations[i])
        cells = [measure(metrics[name]) if name in metrics else "" for name in names]
        rows.append([number(event.epoch), f"{event.step:,}", *cells])
    return table(["epoch", "step", *names], rows, texts=0)


def workers_table(history: History) -> str:
    """Return the table of each worker: its speed, and the parts of its step."""
    rows = []
    for worker in history.workers:
        total = worker.step_seconds
        parts = [_share(worker.stages.get(stage, 0.0), total) if total else "" for stage in STAGES]
        step = f"{number(total * 1e3)} ms" if total else ""
        speed = number(float(np.median(worker.speed.y)))
        rows.append([f"worker {worker.rank}", speed, step, *parts])
    return table(["", "examples/s (median)", "step", *STAGES], rows)


def checkpoints_table(checkpoints: Sequence[Moment]) -> str:
    """Return the table of the last few checkpoints: the earlier ones are mostly gone."""
    rows = [
        (
            str(moment.event.data.get("path", "")),
            f"{moment.event.step:,}",
            number(moment.event.epoch),
            duration(moment.seconds),
            duration(moment.event.data.get("seconds") or 0.0),
            size(moment.event.data.get("bytes") or 0),
        )
        for moment in checkpoints[-5:]
    ]
    return table(["path", "step", "epoch", "after", "took", "size"], rows)


def plan_table(plan: Moment) -> str:
    """Return the table of what was predicted and tried before the run, the best first."""
    rows = [
        (
            str(c["strategy"]) + (f" (refused: {c['refused']})" if c.get("refused") else ""),
            str(c["launcher"]),
            _milliseconds(c.get("predicted_seconds")),
            _milliseconds(c.get("step_seconds")),
            number(c["examples_per_second"]) if c.get("examples_per_second") else "",
            "yes" if c.get("exact") else "no",
        )
        for c in plan.event.data.get("candidates", [])
    ]
    heads = ["strategy", "launcher", "step (predicted)", "step (measured)", "examples/s", "exact"]
    return table(heads, rows, texts=2)


def drifts_table(drifts: Sequence[Moment]) -> str:
    """Return the table of when the steps took another time than they should, and why."""
    rows = [(str(m.event.data.get("cause", "")), f"{m.event.step:,}", duration(m.seconds)) for m in drifts]
    return table(["what was seen", "step", "after"], rows)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def best_of(evaluations: Sequence[Moment]) -> int | None:
    """Return the index of the best evaluation by the workload's own rule; None where it has none."""
    best = [i for i, moment in enumerate(evaluations) if moment.event.data.get("best")]
    return best[-1] if best else None


def metric_curve(evaluations: Sequence[Moment], name: str) -> Curve:
    """Return one metric against the epoch; NaN where an evaluation lacks it."""
    x = np.array([moment.event.epoch for moment in evaluations], dtype=float)
    return Curve(x, np.array([_metrics(moment).get(name, np.nan) for moment in evaluations], dtype=float))


def metric_names(evaluations: Sequence[Moment]) -> list[str]:
    """Return the names of the metrics, in the order in which they came up."""
    return list(dict.fromkeys(name for moment in evaluations for name in _metrics(moment)))


def not_finite(curve: Curve) -> str:
    """Write a sentence about the values that are not finite; empty where all are."""
    bad = len(curve.x) - len(finite(curve).x)
    if not bad:
        return ""
    first = float(curve.x[~np.isfinite(curve.y)][0])
    return f"{bad:,} of {len(curve.x):,} values are not finite, the first at step {first:,.0f}."


def size(count: float) -> str:
    """Format a number of bytes: 12 B, 3.4 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def date(seconds: float) -> str:
    """Format seconds since 1970 as local time: 2026-03-01 14:05:09."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def written(run_dir: Path) -> list[tuple[str, str]]:
    """List what the run directory holds: (path, what it is)."""
    known = {
        "run.json": "what was run, and with which versions",
        "events.jsonl": "every event, one line of JSON each",
        "checkpoints/latest": "the state to go on from",
        "checkpoints/best": "the state at the best evaluation",
        EPISODE: "an episode at the end, with the most probable actions",
        "tensorboard": "scalars: tensorboard --logdir " + str(run_dir / "tensorboard"),
    }
    found = [(str(run_dir / name), what) for name, what in known.items() if (run_dir / name).exists()]
    return [*found, (str(run_dir / "report.html"), "this page")]


def _metrics(moment: Moment) -> dict[str, float]:
    return dict(moment.event.data.get("metrics") or {})


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.0f} %"
