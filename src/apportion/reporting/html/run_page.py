"""The page of a run, section by section; those that have nothing to tell are left out."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from types import ModuleType
from typing import Any

import numpy as np

from apportion.core.event import EPISODE
from apportion.reporting.html import tables
from apportion.reporting.html.document import document, drawing, figure, numbers, pair, section, without_pictures
from apportion.reporting.html.history import Curve, History, Moment
from apportion.reporting.journal import duration, number

STATES = {"finished": "good", "stopped": "warn", "interrupted": "warn", "failed": "bad"}


def page(history: History) -> str:
    """Return the whole HTML document of a run."""
    pictures = drawing()
    title = str(history.run.get("address") or history.run_dir.name)
    sections = [
        _facts(history),
        without_pictures(pictures),
        rollouts_section(history, pictures),
        _metrics(history, pictures),
        _values(history, pictures),
        _speed(history, pictures),
        _plan(history.plans),
        _drifts(history.drifts),
        _faults(history.faults),
        _checkpoints(history.checkpoints),
        _environment(history),
        _written(history),
    ]
    body = "\n".join(section for section in (_head(history, title), *sections) if section)
    return document(title, body)


def _head(history: History, title: str) -> str:
    kind, state = _state(history)
    when = "" if history.began is None or history.ended is None else _when(history.began, history.ended)
    sittings = f", in {len(history.starts)} sittings" if len(history.starts) > 1 else ""
    before = f" after {duration(history.preparing)} of preparation" if history.preparing else ""
    trained = f"{duration(history.seconds)} of training{sittings}{before}" if history.starts else ""
    line = " &middot; ".join(
        part for part in (f'<span class="state {kind}">{escape(state)}</span>', when, trained) if part
    )
    ending = history.end.event.data if history.end else {}
    how = f"<p>Go on with <code>{escape(str(ending['resume']))}</code></p>" if ending.get("resume") else ""
    if ending.get("why"):
        how += f'<p class="note">The last step was not saved: {escape(str(ending["why"]))}</p>'
    return (
        f'<header>\n<p class="over">Training report</p>\n<h1>{escape(title)}</h1>\n<p>{line}</p>\n{how}'
        f"{_tiles(history)}\n</header>"
    )


def _state(history: History) -> tuple[str, str]:
    if history.end is not None:
        reason = str(history.end.event.data.get("reason", "ended"))
        return STATES.get(reason, "warn"), reason.capitalize()
    if history.faults:
        return "bad", "Not finished: it failed, or was killed"
    return "warn", "Not finished: running, or killed"


def _when(began: float, ended: float) -> str:
    first, last = tables.date(began), tables.date(ended)
    return f"{first} to {last[11:] if first[:10] == last[:10] else last}"


def _tiles(history: History) -> str:
    """Return the tiles of the few numbers that a reader looks for first."""
    wanted = [row for row in history.rows if row.name.startswith(("test ", "final "))][:4]
    if not wanted:
        return ""
    wanted += [row for row in history.rows if row.name in ("examples/s", "epochs", "frames/s", "frames")]
    wanted.sort(key=lambda row: not row.name.startswith("test "))
    cells = "".join(f"<div><dt>{escape(row.name)}</dt><dd>{escape(row.text)}</dd></div>\n" for row in wanted)
    return f'<dl class="tiles">\n{cells}</dl>'


def _facts(history: History) -> str:
    start, rows = history.start, {row.name: row.text for row in history.rows}

    def count(name: str) -> str:
        return f"{start[name]:,}" if isinstance(start.get(name), int | float) else ""

    threads = f" x {count('threads')} thread{'' if start['threads'] == 1 else 's'}" if count("threads") else ""
    per_epoch = f" ({count('steps_per_epoch')} an epoch)" if count("steps_per_epoch") else ""
    html = tables.facts(
        [
            ("strategy", str(start.get("strategy") or history.run.get("strategy") or "")),
            ("proof", str((start.get("proof") or {}).get("sentence", ""))),
            ("launcher", str(start.get("launcher") or history.run.get("launcher") or "")),
            ("workers", f"{count('workers')}{threads}" if count("workers") else ""),
            ("device", str(start.get("device") or "")),
            ("parameters", count("parameters")),
            ("training examples", count("examples")),
            ("batch size", count("batch_size")),
            ("loss terms", str(start.get("count") or "")),
            ("steps", rows.get("steps", "") + per_epoch),
            *_settings(history.run),
        ]
    )
    return f"<section>\n{html}\n</section>" if "<dd>" in html else ""


def _settings(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what run.json has of how the numbers came about: the optimizers, the precision, the seed, the versions."""
    fingerprint = run.get("fingerprint")
    fingerprint = fingerprint if isinstance(fingerprint, Mapping) else {}
    for name, found in fingerprint.items():
        if name.startswith("optimizer") and isinstance(found, Mapping):
            group = found.get("group 0")
            rate = group.get("lr") if isinstance(group, Mapping) else None
            yield name, str(found.get("class", "")) + (f", learning rate {rate}" if rate is not None else "")
    for name in ("precision", "seed", *(name for name in fingerprint if name.startswith("argument "))):
        if name in fingerprint:
            yield name, str(fingerprint[name])
    versions = run.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _metrics(history: History, pictures: ModuleType | None) -> str:
    results = tables.metrics_table(history)
    if not results:
        return ""
    drawn, best = [], tables.best_of(history.evaluations)
    if pictures is not None and len(history.evaluations) > 1:
        for name in tables.metric_names(history.evaluations):
            curve = tables.metric_curve(history.evaluations, name)
            drawn.append(figure(pictures.metric_picture(name, curve, best), f"test {name}"))
    html = results + pair(drawn)
    if history.evaluations:
        html += numbers("All evaluations", tables.evaluations_table(history.evaluations), shown=pictures is None)
    return section("Evaluation", html)


def _values(history: History, pictures: ModuleType | None) -> str:
    """Draw a broad picture for the value that matters most, and slim ones for the others."""
    curves = {name: curve for name, curve in history.values.items() if len(curve.x)}
    sections = []
    if curves:
        first = "loss" if "loss" in curves else next(iter(curves))
        sections.append(section(_capital(first), _value(first, curves.pop(first), pictures, wide=True)))
    others = [_value(name, curve, pictures, wide=False) for name, curve in curves.items()]
    others.append(_learning_rate(history.learning_rate, pictures))
    if any(others):
        sections.append(section("Other values" if sections else "Values", pair(others)))
    return "\n".join(sections)


def _value(name: str, curve: Curve, pictures: ModuleType | None, *, wide: bool) -> str:
    picture = pictures.value_picture(name, curve, wide=wide) if pictures is not None and len(curve.x) > 1 else None
    bad = tables.not_finite(curve)
    html = figure(picture, "" if wide else name)
    html += f'<p class="note">{escape(bad)}</p>' if bad else ""
    shown = picture is None
    return html + numbers(f"{_capital(name)} in numbers", tables.values_table(curve), shown=shown)


def _speed(history: History, pictures: ModuleType | None) -> str:
    if not history.workers and not len(history.throughput.x):
        return ""
    html = ""
    if pictures is not None:
        html = figure(pictures.speed_picture(history), "Examples per second")
        stages = pictures.stages_picture(history.workers)
        html += figure(stages, "Where a step's time goes")
    if history.workers:
        html += numbers("Workers in numbers", tables.workers_table(history), shown=not html)
    if not html:
        html = f"<p>{number(float(history.throughput.y[-1]))} examples per second at the end.</p>"
    return section("Speed", html)


def _learning_rate(curve: Curve, pictures: ModuleType | None) -> str:
    if not len(curve.x) or curve.y.min() == curve.y.max():
        return ""
    picture = pictures.learning_rate_picture(curve) if pictures is not None else None
    table = numbers("Learning rate in numbers", tables.values_table(curve), shown=picture is None)
    return figure(picture, "learning rate") + table


def _faults(faults: list[Moment]) -> str:
    return section("Faults", "".join(map(_fault, faults))) if faults else ""


def _fault(moment: Moment) -> str:
    data = moment.event.data
    who = "" if data.get("rank") is None else f"Worker {data['rank']}, "
    where = f"{who}after {moment.event.step:,} steps, {duration(moment.seconds)}"
    action = f"<p>Then: {escape(str(data['action']))}</p>" if data.get("action") else ""
    trace = data.get("traceback")
    shown = f"<details open><summary>Traceback</summary><pre>{escape(str(trace))}</pre></details>" if trace else ""
    return (
        f'<div class="fault"><h3>{escape(str(data.get("cause", "")))}</h3><p>{escape(where)}</p>{action}{shown}</div>'
    )


def _checkpoints(checkpoints: list[Moment]) -> str:
    if not checkpoints:
        return ""
    spent = sum(moment.event.data.get("seconds") or 0.0 for moment in checkpoints)
    times = "One was" if len(checkpoints) == 1 else f"{len(checkpoints):,} were"
    last = "" if len(checkpoints) <= 5 else " The last five:"
    return section(
        "Checkpoints", f"<p>{times} written, in {duration(spent)}.{last}</p>{tables.checkpoints_table(checkpoints)}"
    )


def _environment(history: History) -> str:
    """Return the section of what else run.json holds, without the fingerprint, which is for programs."""
    shown = ("address", "strategy", "launcher", "fingerprint")
    pairs = [pair for name, value in history.run.items() if name not in shown for pair in _flat(name, value)]
    return section("Environment", tables.facts(pairs)) if pairs else ""


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(str(key), item)]
    return [(name.replace("_", " "), value if isinstance(value, str) else json.dumps(value))]


def _written(history: History) -> str:
    rows = [(path, what) for path, what in tables.written(history.run_dir)]
    return section("Files", tables.table(["path", "what it is"], rows, texts=2))


def _plan(plans: list[Moment]) -> str:
    if not plans:
        return ""
    data = plans[-1].event.data
    taken, why = f"{data.get('strategy')} on {data.get('launcher')}", str(data.get("why", ""))
    took = "" if data.get("remembered") else f", after {duration(float(data.get('seconds') or 0.0))}"
    note = f'<p class="note">No strategy was given: {escape(taken)} was taken{escape(took)}; {escape(why)}.</p>'
    return section("Plan", note + tables.plan_table(plans[-1]))


def _drifts(drifts: list[Moment]) -> str:
    return section("Drift", tables.drifts_table(drifts)) if drifts else ""


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


TRAINED, EVALUATED = "episodes of the training", "evaluation"


def rollouts_section(history: History, pictures: ModuleType | None) -> str:
    """The section, or nothing where the examples of a run are not made by what its network does."""
    if not history.rollouts or not history.frames:
        return ""
    drawn: list[str] = []
    if pictures is not None:
        for unit, by_time in (("frames", False), ("seconds of training", True)):
            curves = [(TRAINED, _scores(history, by_time)), (EVALUATED, _evaluated(history, by_time))]
            drawn.append(figure(pictures.scores_picture(curves, unit), f"Score over {unit}"))
    html = pair(drawn) + _episode(history) + _speeds(history)
    return section("Rollouts", html + numbers("Scores in numbers", _table(history), shown=not drawn))


def _episode(history: History) -> str:
    """The film of an episode, where one was kept."""
    path = history.run_dir / EPISODE
    try:
        film = path.read_bytes()
    except OSError:
        return ""
    picture = base64.b64encode(film).decode()
    return (
        f'<figure><img alt="an episode" src="data:image/gif;base64,{picture}"><figcaption>An episode'
        " at the end, with the most probable actions</figcaption></figure>"
    )


def _x(moments: Sequence[Moment], history: History, by_time: bool) -> Iterable[float]:
    return (m.seconds if by_time else m.event.step * history.frames for m in moments)


def _scores(history: History, by_time: bool) -> Curve:
    """The means of the episodes that ended in the training: of all workers together, the latest of each."""
    scored = [m for m in history.rollouts if m.event.data.get("score") is not None]
    latest: dict[int, float] = {}
    means = []
    for moment in scored:
        latest[int(moment.event.data["rank"])] = float(moment.event.data["score"])
        means.append(sum(latest.values()) / len(latest))
    return Curve(np.fromiter(_x(scored, history, by_time), float), np.asarray(means, float))


def _evaluated(history: History, by_time: bool) -> Curve:
    scored = [m for m in history.evaluations if "score" in m.event.data.get("metrics", {})]
    found = [float(m.event.data["metrics"]["score"]) for m in scored]
    return Curve(np.fromiter(_x(scored, history, by_time), float), np.asarray(found, float))


def _speeds(history: History) -> str:
    """A table of the workers: frames a second, and what share of an update's time each part of the work has."""
    spent: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for moment in history.rollouts:
        data = moment.event.data
        if data.get("frames_per_second"):
            spent[int(data["rank"])].append(tuple(data[n] for n in ("frames_per_second", "environment", "acting")))
    rows = []
    for worker in history.workers:
        if worker.rank not in spent or not worker.step_seconds:
            continue
        speed, environment, acting = np.median(np.asarray(spent[worker.rank]), axis=0)
        stages, whole = worker.stages, worker.step_seconds
        made = max(environment + acting, 1e-12)
        played = stages.get("loading", 0.0)
        parts = [
            played * environment / made,
            played * acting / made,
            stages.get("computing", 0.0),
            stages.get("updating", 0.0),
            stages.get("waiting", 0.0),
        ]
        rows.append([f"worker {worker.rank}", number(float(speed)), *(f"{part / whole:.0%}" for part in parts)])
    heads = ["worker", "frames/s", "environment", "acting", "learning", "pushing and pulling", "waiting"]
    return tables.table(heads, rows) if rows else ""


def _table(history: History) -> str:
    rows = [
        [f"{m.event.step * history.frames:,}", f"{m.seconds:.1f}", number(float(m.event.data["metrics"]["score"]))]
        for m in history.evaluations
        if "score" in m.event.data.get("metrics", {})
    ]
    return tables.table(["frames", "seconds", "score"], rows, texts=0)
