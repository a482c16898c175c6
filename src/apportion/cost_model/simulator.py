"""One small event simulator: tasks that wait for each other and for the devices and links that they occupy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from apportion.cost_model.cost import Span


@dataclass(frozen=True)
class SimulatedTask:
    """Work that occupies some devices or links for a time, after other tasks are done."""

    name: str
    kind: str
    """The kind of work, one of ``cost.TERMS``."""
    on: tuple[str, ...]
    seconds: float
    after: tuple[int, ...] = ()
    """The tasks that this one waits for, by their places in the list of tasks."""
    order: float = 0.0
    """The priority of the task: of those that could begin, the lowest goes first; of equals, the one that stands first
    in the list."""


def simulate(tasks: Sequence[SimulatedTask]) -> tuple[Span, ...]:
    """The spans in which the tasks run, in the order of the list. A task begins as soon as it can; it waits for devices
    and links that are taken.

    ValueError where tasks wait for each other in a circle.
    """
    return _Simulation(tasks).run()


class _Simulation:
    """The state of every task, while time goes from one end of a task to the next."""

    def __init__(self, tasks: Sequence[SimulatedTask]) -> None:
        self.tasks = tasks
        self.missing = [len(task.after) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            if not task.on:
                raise ValueError(f"task {task.name}: it has to occupy something")
            for before in task.after:
                self.followers[before].append(i)
        self.lines: dict[str, list[tuple[float, int]]] = {name: [] for task in tasks for name in task.on}
        self.free = dict.fromkeys(self.lines, True)
        self.spans: list[Span | None] = [None] * len(tasks)
        self.running: list[tuple[float, int]] = []

    def run(self) -> tuple[Span, ...]:
        for i, missing in enumerate(self.missing):
            if not missing:
                self._offer(i)
        self._start(self.lines, 0.0)
        while self.running:
            now = self.running[0][0]
            touched: dict[str, None] = {}
            while self.running and self.running[0][0] <= now:
                touched |= self._end(heapq.heappop(self.running)[1])
            self._start(touched, now)
        done = tuple(span for span in self.spans if span is not None)
        if len(done) < len(self.tasks):
            stuck = next(t.name for t, span in zip(self.tasks, self.spans, strict=True) if span is None)
            raise ValueError(f"task {stuck} waits for itself")
        return done

    def _offer(self, i: int) -> None:
        for name in self.tasks[i].on:
            heapq.heappush(self.lines[name], (self.tasks[i].order, i))

    def _first(self, name: str) -> int | None:
        """The first task in the line of a device or link that has not begun; None where there is none."""
        line = self.lines[name]
        while line and self.spans[line[0][1]] is not None:
            heapq.heappop(line)
        return line[0][1] if line else None

    def _start(self, names: Iterable[str], now: float) -> None:
        """Start each task that is first in the line of everything that it needs, where all of that is free."""
        for name in names:
            while self.free[name] and (i := self._first(name)) is not None:
                task = self.tasks[i]
                if not all(self.free[n] and self._first(n) == i for n in task.on):
                    break
                self.spans[i] = Span("+".join(task.on), task.name, task.kind, now, now + task.seconds)
                self.free |= dict.fromkeys(task.on, False)
                heapq.heappush(self.running, (now + task.seconds, i))

    def _end(self, i: int) -> dict[str, None]:
        """End a task, and return the devices and links that may have something to do now."""
        touched = dict.fromkeys(self.tasks[i].on)
        self.free |= dict.fromkeys(self.tasks[i].on, True)
        for follower in self.followers[i]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self._offer(follower)
                touched |= dict.fromkeys(self.tasks[follower].on)
        return touched


def makespan(spans: Iterable[Span]) -> float:
    """The seconds from the first beginning to the last end."""
    return max((span.end for span in spans), default=0.0)


def terms(spans: Sequence[Span], device: str) -> dict[str, float]:
    """A step's time as one device spends it, by kind: what it does; what it is idle for, while a link carries something
    (communicating) or not (bubble)."""
    own = [(s.begin, s.end, s.kind) for s in spans if s.on == device]
    carried = [(s.begin, s.end) for s in spans if s.kind == "communicating" and s.on != device]
    return spent(own, carried, makespan(spans))


def spent(
    own: Iterable[tuple[float, float, str]], carried: Iterable[tuple[float, float]], end: float
) -> dict[str, float]:
    """The time of a step that ends at ``end``, by kind, as one device spends it. ``own``: (begin, end, kind) of what
    the device does; ``carried``: (begin, end) of what links carry."""
    found: dict[str, float] = {}
    at = 0.0
    idle: list[tuple[float, float]] = []
    for begin, until, kind in sorted(own):
        found[kind] = found.get(kind, 0.0) + until - begin
        if begin > at:
            idle.append((at, begin))
        at = max(at, until)
    if end > at:
        idle.append((at, end))
    lying = sum(b - a for a, b in idle)
    exposed = sum(_common(idle, _union(carried)))
    found["communicating"] = found.get("communicating", 0.0) + exposed
    found["bubble"] = found.get("bubble", 0.0) + lying - exposed
    return found


def _common(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Iterator[float]:
    """The seconds for which the stretches of two rows overlap, stretch by stretch; in each row none begins before the
    last has ended."""
    first = 0
    for a, b in some:
        while first < len(others) and others[first][1] <= a:
            first += 1
        at = first
        while at < len(others) and others[at][0] < b:
            yield min(b, others[at][1]) - max(a, others[at][0])
            at += 1


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
