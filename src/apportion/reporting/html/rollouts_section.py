"""The part of a run's page about rollouts: scores over frames and over time, and where the time of the workers goes."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import ModuleType

import numpy as np

from apportion.core.event import EPISODE
from apportion.reporting.html import tables
from apportion.reporting.html.document import figure, numbers, pair, section
from apportion.reporting.html.history import Curve, History, Moment
from apportion.reporting.journal import number

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
