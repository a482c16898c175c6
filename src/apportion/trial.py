"""Short measured runs: each candidate makes real steps, in turns with the others, one running at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from apportion.comm.channel import Message
from apportion.crew import Crew
from apportion.job import Job
from apportion.launch.local import Local, usable_cores
from apportion.strategy import Strategy
from apportion.values import find, parse
from apportion.workload import Workload

BUILD_SECONDS = 600.0
ROUND_SECONDS = 600.0
TRIAL_SECONDS = 6.0
"""Of measuring, for all candidates together; starting them comes on top."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy on a layout of processes and threads."""

    strategy: Strategy
    launcher: Local
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.launcher}"


@dataclass
class Measured:
    """What a candidate's steps took, over all rounds."""

    candidate: Candidate
    seconds: list[float] = field(default_factory=list)
    """Of each step: the slowest rank's."""
    examples: int = 0
    computing: float = 0.0
    waiting: float = 0.0
    """For other ranks to arrive; with ``communicating`` and ``computing``, sums over ranks."""
    communicating: float = 0.0
    peak_bytes: int = 0
    """Of the largest worker."""

    @property
    def step_seconds(self) -> float:
        """Median."""
        return statistics.median(self.seconds)

    @property
    def examples_per_second(self) -> float:
        """At the median step."""
        return self.examples / len(self.seconds) / self.step_seconds

    def add(self, answers: Sequence[Message]) -> None:
        """One round, as every rank tells it."""
        self.seconds += [max(parts) for parts in zip(*(a["seconds"] for a in answers), strict=True)]
        self.examples += answers[0]["examples"]
        waiting, communicating = divide_waits([a["waits"] for a in answers])
        total = sum(sum(a["seconds"]) for a in answers)
        self.waiting += waiting
        self.communicating += communicating
        self.computing += max(0.0, total - waiting - communicating)
        self.peak_bytes = max(self.peak_bytes, *(a["peak_bytes"] for a in answers))


def divide_waits(waits: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """(waiting, communicating) seconds over all ranks, from when each rank began and ended each of its waits.

    The ranks call the same collectives in the same order: until the last of them has begun one, the others wait for
    it; from then on the data moves.
    """
    waiting = communicating = 0.0
    for same in zip(*waits, strict=False):
        last = max(began for began, _ in same)
        for began, ended in same:
            arrived = min(last, ended)
            waiting += max(0.0, arrived - began)
            communicating += ended - max(began, arrived)
    return waiting, communicating


class Parked:
    """A candidate's processes: built, warm, and asleep between rounds."""

    def __init__(self, candidate: Candidate, workload: Workload | str, changes: Mapping[str, Any]) -> None:
        launcher = candidate.launcher
        job = Job(
            workload=workload,
            strategy=candidate.strategy,
            launcher=str(launcher),
            threads=launcher.threads_each(candidate.ranks),
            device=launcher.device,
            loaders=launcher.loaders,
            changes=changes,
        )
        self.measured = Measured(candidate)
        self.crew = Crew(launcher, "apportion.entry:steps", job, candidate.ranks)

    def built(self) -> Message:
        """What the ranks tell once their step is built: ``steps`` in all, ``precision``."""
        return self.crew.answers("built", BUILD_SECONDS)[0]

    def go(self, steps: int, *, measure: bool = True) -> list[Message]:
        """So many steps."""
        answers = self.crew.ask({"kind": "go", "steps": steps}, "went", ROUND_SECONDS)
        if measure:
            self.measured.add(answers)
        return answers


@contextmanager
def parked(
    candidates: Sequence[Candidate], workload: Workload | str, changes: Mapping[str, Any]
) -> Iterator[list[Parked]]:
    """Every candidate built, one after the other, and ended at the end."""
    groups: list[Parked] = []
    try:
        for candidate in candidates:
            groups.append(Parked(candidate, workload, changes))
            groups[-1].built()
        yield groups
    finally:
        for group in groups:
            group.crew.close()


def candidate(strategy: Strategy, launcher: Local) -> Candidate:
    """The strategy with every number of the launcher filled in."""
    workers, ranks = layout(strategy, launcher)
    threads = launcher.threads_each(ranks)
    return Candidate(strategy=strategy, launcher=replace(launcher, workers=workers, threads=threads), ranks=ranks)


def layout(strategy: Strategy, launcher: Local) -> tuple[int, int]:
    """(workers that take batches, processes in all)."""
    if strategy.one_process and launcher.workers not in (None, 1):
        raise ValueError(f"{strategy} runs in one process, not in {launcher.workers}: use workers=1, or data_parallel")
    workers = launcher.workers or (1 if strategy.one_process else usable_cores())
    return workers, strategy.ranks(workers)


def choose(
    workload: Workload | str, launcher: Local, changes: Mapping[str, Any], seconds: float = TRIAL_SECONDS
) -> list[Measured]:
    """One process with all threads against data_parallel on a few layouts, measured; the fastest first."""
    candidates = _candidates(launcher)
    if len(candidates) == 1:
        return [Measured(candidates[0])]
    with parked(candidates, workload, changes) as groups:
        steps = {id(g): _warm(g, seconds / (4 * len(groups))) for g in groups}
        end = time.monotonic() + seconds
        while time.monotonic() < end or not all(len(g.measured.seconds) >= 3 for g in groups):
            for group in groups:
                group.go(steps[id(group)])
        return sorted((g.measured for g in groups), key=lambda m: m.step_seconds)


def _warm(group: Parked, seconds: float) -> int:
    """A first step and a few more; how many make about a quarter of the time."""
    group.go(1, measure=False)
    began = time.perf_counter()
    group.go(2, measure=False)
    a_step = (time.perf_counter() - began) / 2
    return max(1, min(200, int(seconds / max(a_step, 1e-6))))


def _candidates(launcher: Local) -> list[Candidate]:
    single: Strategy = find("single_device", "apportion.strategies")()
    parallel: Strategy = parse("data_parallel", "apportion.strategies")
    if launcher.workers == 1:
        return [candidate(single, launcher)]
    if launcher.workers is not None:
        counts = [launcher.workers]
    else:
        cores = usable_cores()
        counts = [n for n in (cores, cores // 2, cores // 4) if n > 1]
    alone = replace(launcher, workers=1)
    return [candidate(single, alone), *(candidate(parallel, replace(launcher, workers=n)) for n in counts)]
