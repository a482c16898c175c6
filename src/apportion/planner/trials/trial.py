"""Short measured runs: each candidate makes real steps, in turns with the others, one running at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apportion.comm.channel import Message
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cost import Cost
from apportion.errors import WorkerFailed
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.ranks import LocalRanks, Ranks, StepPool
from apportion.runtime.worker.job import MANY_STEPS, Job

BUILD_SECONDS = 600.0
ROUND_SECONDS = 600.0
TURN_SECONDS = 0.05
"""The seconds of one candidate's turn: long beside what a turn costs to begin, short beside what else the machine
does."""
ROUNDS, LEAST_ROUNDS = 20, 4
"""The largest and the smallest number of rounds of turns: in four rounds a coin does not fall on one side by chance, at
90 %."""
BEHIND = 1.5
"""The factor between a candidate's time and the fastest one's from which the candidate is not measured to the end."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy on a layout of processes and threads."""

    strategy: Strategy
    launcher: Local
    ranks: int
    cost: Cost | None = field(default=None, compare=False)
    """The predicted cost, where it is known."""

    def __str__(self) -> str:
        return f"{self.strategy} on {self.launcher}"


@dataclass
class Measured:
    """The times that a candidate's steps took, over all rounds."""

    candidate: Candidate
    seconds: list[float] = field(default_factory=list)
    """The seconds of each step: the slowest rank's."""
    rounds: dict[int, float] = field(default_factory=dict)
    """The median seconds of a step in each round, by the round's number: rounds of the same number were made one after
    the other."""
    examples: int = 0
    computing: float = 0.0
    """The seconds of computing, including ``loading`` and ``updating``, which are also given by themselves."""
    loading: float = 0.0
    updating: float = 0.0
    waiting: float = 0.0
    """The seconds of waiting for other ranks to arrive; like ``communicating`` and ``computing``, a sum over ranks."""
    communicating: float = 0.0
    without_core: list[float] = field(default_factory=list)
    """The largest share of a round, over ranks, in which a rank could have gone on and had no core; one value for each
    round."""
    peak_bytes: int = 0
    """The peak memory of the worker that used most, in bytes."""
    held_bytes: int = 0
    """The bytes of weights, slots and buffers of all workers; what they share is counted once."""

    @property
    def next_round(self) -> int:
        """The number of the next round."""
        return max(self.rounds, default=-1) + 1

    @property
    def step_seconds(self) -> float:
        """The median seconds of a step."""
        return float(np.median(self.seconds))

    @property
    def p90_seconds(self) -> float:
        """The seconds that nine steps of ten take at most."""
        return float(np.quantile(self.seconds, 0.9, method="inverted_cdf"))

    @property
    def without_core_share(self) -> float:
        """The share of the median round in which a rank could have gone on and had no core."""
        return float(np.median(self.without_core)) if self.without_core else 0.0

    @property
    def examples_per_second(self) -> float:
        """The number of examples that are learned from in a second, at the median step."""
        return self.examples / len(self.seconds) / self.step_seconds

    @property
    def seconds_per_example(self) -> float:
        """The seconds of an example, which candidates are ranked by."""
        return 1.0 / self.examples_per_second

    @property
    def terms(self) -> dict[str, float]:
        """The seconds of the median step, by what a rank's time goes to: ``loading``, ``computing``, ``updating``, and
        ``waiting`` in collectives, both for other ranks and for what is sent."""
        parts = {
            "loading": self.loading,
            "computing": max(0.0, self.computing - self.loading - self.updating),
            "waiting": self.waiting + self.communicating,
            "updating": self.updating,
        }
        total = sum(parts.values()) or 1.0
        return {name: self.step_seconds * seconds / total for name, seconds in parts.items()}

    def add(self, answers: Sequence[Message], turn: int | None = None) -> None:
        """Add one round, as every rank reports it; ``turn``: the number of the round."""
        stepping = [a["seconds"] for a in answers if a["seconds"]]  # servers make no steps
        steps = [max(parts) for parts in zip(*stepping, strict=True)]
        self.seconds += steps
        self.rounds[self.next_round if turn is None else turn] = float(np.median(steps))
        # Ranks in lockstep make one step of one batch; otherwise each has a batch of its own.
        self.examples += sum(answer["examples"] for answer in (answers[:1] if answers[0]["lockstep"] else answers))
        self.without_core.append(max(a["without_core"] for a in answers))
        waiting, communicating = divide_waits([a["waits"] for a in answers])
        total = sum(sum(a["seconds"]) for a in answers)
        self.waiting += waiting
        self.communicating += communicating
        self.computing += max(0.0, total - waiting - communicating)
        self.loading += sum(a["spent"].get("loading", 0.0) for a in answers)
        self.updating += sum(a["spent"].get("updating", 0.0) for a in answers)
        shared, own = max(a["held"]["shared"] for a in answers), sum(a["held"]["own"] for a in answers)
        self.held_bytes = shared + own
        self.peak_bytes = max(self.peak_bytes, *(a["peak_bytes"] for a in answers))


def divide_waits(waits: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Divide the waits into (waiting, communicating) seconds over all ranks, from when each rank began and ended each
    of its waits.

    The ranks call the same collectives in the same order: until the last of them has begun a collective, the others
    wait for it; from then on the data moves.
    """
    waiting = communicating = 0.0
    for same in zip(*waits, strict=False):
        last = max(began for began, _ in same)
        for began, ended in same:
            arrived = min(last, ended)
            waiting += max(0.0, arrived - began)
            communicating += ended - max(began, arrived)
    return waiting, communicating


class TrialWorkers:
    """The processes of a candidate: built, warm, and asleep between rounds."""

    def __init__(
        self,
        candidate: Candidate,
        workload: Workload | str,
        changes: Mapping[str, Any],
        *,
        steps: int = MANY_STEPS,
        ranks: Ranks | None = None,
        which: int = 0,
    ) -> None:
        """Have ranks build the step of the candidate. ``steps``: the number of steps that a schedule is given.
        ``ranks``: those that make its steps, by their job of the number ``which``; None: processes of this machine."""
        launcher = candidate.launcher
        job = Job(
            workload=workload,
            strategy=candidate.strategy,
            launcher=str(launcher),
            threads=launcher.threads_each(candidate.ranks),
            device=launcher.device,
            loaders=launcher.loaders,
            changes={**changes, "steps": steps},
        )
        self.measured = Measured(candidate)
        self.failed = False
        """Did a worker fail, instead of making steps?"""
        self.pool: StepPool = (ranks or LocalRanks()).begin(job, launcher, candidate.ranks, which=which)

    def built(self) -> Message:
        """Return what the ranks report once their step is built: ``steps`` in all, ``precision``."""
        return self.pool.answers("built", BUILD_SECONDS)[0]

    def facts(self) -> Message:
        """Ask for facts of the workload: ``mark`` distinguishes this workload from others; ``steps`` is the number of
        steps that it has as it is written."""
        return self.pool.ask({"kind": "facts"}, "facts", ROUND_SECONDS)[0]

    def loss(self, examples: int) -> float:
        """Compute the loss on at most ``examples`` of the examples that are kept for it."""
        answers = self.pool.ask({"kind": "evaluate", "examples": examples}, "evaluated", ROUND_SECONDS)
        return float(next(a["loss"] for a in answers if a["loss"] is not None))

    def go(self, steps: int, *, measure: bool = True, turn: int | None = None) -> list[Message]:
        """Make ``steps`` steps; ``turn``: the number of the round that the steps belong to."""
        try:
            answers = self.pool.ask({"kind": "go", "steps": steps}, "went", ROUND_SECONDS)
        except (ValueError, WorkerFailed):
            self.failed = True
            raise
        if measure:
            self.measured.add(answers, turn)
        return answers


@contextmanager
def parked(
    candidates: Sequence[Candidate],
    workload: Workload | str,
    changes: Mapping[str, Any],
    refused: list[tuple[Candidate, str]] | None = None,
    ranks: Ranks | None = None,
    first: int = 0,
) -> Iterator[list[TrialWorkers]]:
    """Build every candidate, one after the other, and end all at the end. ``refused``: the list for the candidates that
    cannot run this workload, each with the reason; without it, or where the first cannot run, such a candidate is an
    error. ``ranks``: those that make the steps; ``first``: the number of the first candidate among their jobs."""
    groups: list[TrialWorkers] = []
    try:
        for which, candidate in enumerate(candidates, first):
            groups.append(TrialWorkers(candidate, workload, changes, ranks=ranks, which=which))
            try:
                groups[-1].built()
            except ValueError as error:
                groups.pop().pool.close()
                if refused is None or not groups:  # with the first there is something to compare with
                    raise
                refused.append((candidate, str(error)))
        yield groups
    finally:
        for group in groups:
            group.pool.close()


def candidate(strategy: Strategy, launcher: Local, cost: Cost | None = None) -> Candidate:
    """Return the strategy as a candidate, with every number of the launcher filled in."""
    workers, ranks = layout(strategy, launcher)
    where = replace(launcher, workers=workers, threads=launcher.threads_each(ranks))
    return Candidate(strategy=strategy, launcher=where, ranks=ranks, cost=cost)


def layout(strategy: Strategy, launcher: Local) -> tuple[int, int]:
    """Return (the number of workers that take batches, the number of processes in all). Raises ValueError where several
    workers are asked for and the strategy runs in one process."""
    if strategy.one_process and launcher.workers not in (None, 1):
        raise ValueError(f"{strategy} runs in one process, not in {launcher.workers}: use workers=1, or data_parallel")
    workers = launcher.workers or (1 if strategy.one_process else launcher.places())
    return workers, strategy.ranks(workers)


def take_turns(groups: Sequence[TrialWorkers], seconds: float) -> None:
    """Measure each of the candidates, in turns that change their order from round to round, until ``ROUNDS`` are made
    or the time is up, whichever is first; ``LEAST_ROUNDS`` at least. After these, a candidate that is far behind takes
    no more turns."""
    began = time.monotonic()
    turn = min(TURN_SECONDS, seconds / (ROUNDS * len(groups)))
    steps = {id(group): _warm(group, turn) for group in groups}
    going = list(groups)
    first = max(group.measured.next_round for group in groups)
    for done in range(ROUNDS):
        if done >= LEAST_ROUNDS:
            if len(going) < 2 or time.monotonic() - began > seconds:
                return
            going = in_sight(going)
        for group in going if done % 2 == 0 else reversed(going):
            group.go(steps[id(group)], turn=first + done)


def in_sight(groups: Sequence[TrialWorkers]) -> list[TrialWorkers]:
    """Return the candidates that may still come out first."""
    best = min(group.measured.seconds_per_example for group in groups)
    return [group for group in groups if group.measured.seconds_per_example < BEHIND * best]


def _warm(group: TrialWorkers, seconds: float) -> int:
    """Make a first step and a few more; return how many steps make one turn."""
    group.go(1, measure=False)
    began = time.perf_counter()
    group.go(2, measure=False)
    a_step = (time.perf_counter() - began) / 2
    return max(1, min(200, int(seconds / max(a_step, 1e-6))))
