"""Short measured runs: each candidate makes real steps, in turns with the others, one running at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apportion.comm.channel import Message
from apportion.crew import Crew
from apportion.job import Job
from apportion.launch.local import Local
from apportion.strategy import Strategy
from apportion.values import find
from apportion.workload import Workload

BUILD_SECONDS = 600.0
ROUND_SECONDS = 600.0
TRIAL_SECONDS = 2.0
"""Of measuring, for all candidates together; starting them comes on top."""
MANY_STEPS = 1_000_000
"""What a schedule is told: it may refuse to go on where it takes the training to be over."""
LEAST_STEPS = 3
"""That each candidate is judged by."""


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
    held_bytes: int = 0
    """Weights, slots and buffers of all workers, what they share counted once."""

    @property
    def step_seconds(self) -> float:
        """Median."""
        return float(np.median(self.seconds))

    @property
    def examples_per_second(self) -> float:
        """At the median step."""
        return self.examples / len(self.seconds) / self.step_seconds

    def add(self, answers: Sequence[Message]) -> None:
        """One round, as every rank tells it."""
        stepping = [a["seconds"] for a in answers if a["seconds"]]  # servers make no steps
        self.seconds += [max(parts) for parts in zip(*stepping, strict=True)]
        # Ranks in lockstep make one step of one batch; otherwise each has a batch of its own.
        self.examples += sum(answer["examples"] for answer in (answers[:1] if answers[0]["lockstep"] else answers))
        waiting, communicating = divide_waits([a["waits"] for a in answers])
        total = sum(sum(a["seconds"]) for a in answers)
        self.waiting += waiting
        self.communicating += communicating
        self.computing += max(0.0, total - waiting - communicating)
        shared, own = max(a["held"]["shared"] for a in answers), sum(a["held"]["own"] for a in answers)
        self.held_bytes = shared + own
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
            changes={**changes, "steps": MANY_STEPS},
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
    candidates: Sequence[Candidate],
    workload: Workload | str,
    changes: Mapping[str, Any],
    refused: list[tuple[Candidate, str]] | None = None,
) -> Iterator[list[Parked]]:
    """Every candidate built, one after the other, and ended at the end. ``refused``: where those go that cannot run
    this workload, and why; without it, that is an error."""
    groups: list[Parked] = []
    try:
        for candidate in candidates:
            groups.append(Parked(candidate, workload, changes))
            try:
                groups[-1].built()
            except ValueError as error:
                groups.pop().crew.close()
                if refused is None or not groups:  # with the first there is something to compare with
                    raise
                refused.append((candidate, str(error)))
        yield groups
    finally:
        for group in groups:
            group.crew.close()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was tried, and how it went."""

    ranking: list[Measured]
    """The fastest first."""
    refused: list[tuple[Candidate, str]]
    """What cannot run this workload, and why."""
    seconds: float
    """It all took."""

    def told(self) -> dict[str, Any]:
        """The data of a ``trial`` event."""
        return {
            "ranking": [
                {
                    "strategy": str(m.candidate.strategy),
                    "launcher": str(m.candidate.launcher),
                    "step_seconds": m.step_seconds,
                    "examples_per_second": m.examples_per_second,
                }
                for m in self.ranking
            ],
            "refused": [
                {"strategy": str(c.strategy), "launcher": str(c.launcher), "cause": why} for c, why in self.refused
            ],
            "seconds": self.seconds,
        }


def candidate(strategy: Strategy, launcher: Local) -> Candidate:
    """The strategy with every number of the launcher filled in."""
    workers, ranks = layout(strategy, launcher)
    threads = launcher.threads_each(ranks)
    return Candidate(strategy=strategy, launcher=replace(launcher, workers=workers, threads=threads), ranks=ranks)


def layout(strategy: Strategy, launcher: Local) -> tuple[int, int]:
    """(workers that take batches, processes in all)."""
    if strategy.one_process and launcher.workers not in (None, 1):
        raise ValueError(f"{strategy} runs in one process, not in {launcher.workers}: use workers=1, or data_parallel")
    workers = launcher.workers or (1 if strategy.one_process else launcher.places())
    return workers, strategy.ranks(workers)


def candidates(launcher: Local) -> list[Candidate]:
    """What can be tried: one process with all threads and with one, and data_parallel on a few layouts. Where so many
    workers are asked for, only what has so many."""
    single: Strategy = find("single_device", "apportion.strategies")()
    parallel: Strategy = find("data_parallel", "apportion.strategies")()
    if launcher.workers is not None:
        return [candidate(single if launcher.workers == 1 else parallel, launcher)]
    places = launcher.places()
    counts = [n for n in (places, places // 2, places // 4) if n > 1]
    alone = [candidate(single, launcher)]
    if alone[0].launcher.threads != 1:  # a small network is fastest where no thread waits for another
        alone.append(candidate(single, replace(launcher, threads=1)))
    return [*alone, *(candidate(parallel, replace(launcher, workers=n)) for n in counts)]


def choose(
    tried: Sequence[Candidate], workload: Workload | str, changes: Mapping[str, Any], seconds: float = TRIAL_SECONDS
) -> Trial:
    """Each candidate measured, in turns. The first has to be able to run the workload, the others may refuse it."""
    began = time.monotonic()
    refused: list[tuple[Candidate, str]] = []
    with parked(tried, workload, changes, refused) as groups:
        _measure(groups, seconds)
        ranking = sorted((g.measured for g in groups), key=lambda m: m.step_seconds)
    return Trial(ranking=ranking, refused=refused, seconds=time.monotonic() - began)


def _measure(groups: Sequence[Parked], seconds: float) -> None:
    steps = [_warm(group, seconds / (4 * len(groups))) for group in groups]
    end = time.monotonic() + seconds
    while time.monotonic() < end or not all(len(g.measured.seconds) >= LEAST_STEPS for g in groups):
        for group, many in zip(groups, steps, strict=True):
            group.go(many)


def _warm(group: Parked, seconds: float) -> int:
    """A first step and a few more; how many make about a quarter of the time."""
    group.go(1, measure=False)
    began = time.perf_counter()
    group.go(2, measure=False)
    a_step = (time.perf_counter() - began) / 2
    return max(1, min(200, int(seconds / max(a_step, 1e-6))))
