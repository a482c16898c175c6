"""The page of a plan, and its sections in the report of a run: drawn from what ``Plan.to_json`` gives."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from types import ModuleType
from typing import Any

from apportion.reporting.html import tables
from apportion.reporting.html.document import document, drawing, figure, numbers, section, without_pictures
from apportion.reporting.journal import number

TERMS = ("computing", "updating", "loading", "communicating", "bubble", "waiting")


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the whole HTML document of a plan."""
    pictures = drawing()
    sections = [_head(plan), without_pictures(pictures), *plan_sections(plan, pictures)]
    return document(f"Plan of {plan['workload']}", "\n".join(part for part in sections if part))


def plan_sections(plan: Mapping[str, Any], pictures: ModuleType | None) -> list[str]:
    """Return the sections of a plan: what was chosen and why, every strategy's step by what it goes to, one step as a
    picture, and what to type."""
    return [
        section("The plan", _chosen(plan)),
        section("Strategies", _strategies(plan, pictures)),
        _rollouts(plan),
        _step(plan, pictures),
        section("To run it", _commands(plan)),
    ]


def _head(plan: Mapping[str, Any]) -> str:
    batch = f"batches of {plan['batch_size']:,} on {plan['cluster']}"
    tiles = [
        ("a step", _milliseconds(plan["step_seconds"])),
        ("examples/s", number(plan["examples_per_second"])),
        ("within", f"{plan['band']:.0%}"),
        ("workers", f"{plan['workers']}"),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>\n" for name, text in tiles)
    how = "measured" if plan.get("measured") else "predicted"
    return (
        f'<header>\n<p class="over">Plan</p>\n<h1>{escape(str(plan["workload"]))}</h1>\n<p>{escape(batch)}, {how}</p>\n'
        f'<dl class="tiles">\n{cells}</dl>\n</header>'
    )


def _chosen(plan: Mapping[str, Any]) -> str:
    chosen = f"<p><code>{escape(plan['strategy'])}</code> on <code>{escape(plan['launcher'])}</code></p>"
    matched = plan.get("matched") or {}
    lines = [
        ("Why", plan["because"]),
        ("When it would change", plan["sensitivities"]),
        ("Side by side", [matched["text"]] if matched else []),
    ]
    return chosen + "".join(_lines(title, texts) for title, texts in lines if texts)


def _lines(title: str, texts: list[str]) -> str:
    return f"<h3>{escape(title)}</h3>" + "".join(f"<p>{escape(text)}</p>" for text in texts)


def _strategies(plan: Mapping[str, Any], pictures: ModuleType | None) -> str:
    able = [c for c in plan["candidates"] if c["step_seconds"] is not None]
    html = ""
    if pictures is not None:
        from apportion.reporting.html.charts import terms_picture

        html = figure(terms_picture(able, plan["batch_size"]), "Where the time of one batch goes")
    heads = ["strategy", "launcher", "why", "step", "measured", "examples/s", "memory", "exact"]
    table = tables.table(heads, [_row(c) for c in plan["candidates"]], texts=3)
    return html + numbers("All in numbers", table, shown=not html)


def _row(candidate: Mapping[str, Any]) -> list[str]:
    cells = [candidate["strategy"], candidate["launcher"], candidate["why"]]
    exact = "yes" if candidate["exact"] else "no"
    if candidate["step_seconds"] is None:
        return [*cells, "", "", "", "", exact]
    measured = candidate["measured"]
    return [
        *cells,
        _milliseconds(candidate["predicted_step_seconds"]),
        _milliseconds(measured["step_seconds"]) if measured else "",
        f"{number(candidate['examples_per_second'])} ±{candidate['error']:.0%}",
        tables.size(candidate["memory_bytes"]),
        exact,
    ]


def _rollouts(plan: Mapping[str, Any]) -> str:
    """Write the frames a second of other numbers of environments and steps; nothing where the network does not make its
    examples, or an older version has made the plan."""
    rates = plan.get("rollouts") or []
    if not rates:
        return ""
    heads = ["environments x steps", "strategy", "device", "workers", "frames/s", *(f"{p}, us" for p in _PARTS)]
    most = max(rate["frames_per_second"] for rate in rates)
    table = tables.table(heads, [_rate(rate, most) for rate in rates], texts=3)
    note = "Predicted. Microseconds are those of a frame, of the worker that makes it; each worker has one actor."
    lines = "".join(f"<p>{escape(text)}</p>" for text in [*plan["rollouts_because"], note])
    return section("Other rollouts", lines + numbers("All in numbers", table, shown=False))


_PARTS = ("environment", "acting", "learning", "rest")


def _rate(rate: Mapping[str, Any], most: float) -> list[str]:
    size = f"{rate['environments']} x {rate['steps']}{' (own)' if rate['own'] else ''}"
    best = " (most)" if rate["frames_per_second"] == most else ""
    each = (number(rate[f"{part}_seconds"] * 1e6) for part in _PARTS)
    return [
        size,
        rate["strategy"],
        rate["kind"],
        f"{rate['workers']}",
        f"{rate['frames_per_second']:,.0f}{best}",
        *each,
    ]


def _step(plan: Mapping[str, Any], pictures: ModuleType | None) -> str:
    if pictures is None or not plan["timeline"]:
        return ""
    from apportion.reporting.html.charts import timeline_picture

    return section("One step", figure(timeline_picture(plan["timeline"]), "What each device and link does: predicted"))


def _commands(plan: Mapping[str, Any]) -> str:
    commands = plan["commands"]
    lines = [commands["apportion"]] if commands["apportion"] else []
    note = "" if lines else "<p>On each host, with its own NODE_RANK from 0 up:</p>"
    return note + "".join(f"<pre>{escape(line)}</pre>" for line in [*lines, commands["torchrun"]])


def _milliseconds(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms"
