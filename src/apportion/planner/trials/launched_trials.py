"""Real steps of several strategies in ranks that are running already: built side by side, one running at a time, in
turns that change their order from round to round, as long as they may still come out first."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import TypeVar

import torch

from apportion.comm.group import collective, gather_messages
from apportion.comm.world import World
from apportion.core.strategy import Step, Strategy, batches
from apportion.core.value import parse
from apportion.core.workload import Workload
from apportion.planner.trials.significance import ALIKE, SURE, faster_confidence
from apportion.runtime.worker.job import MANY_STEPS

LEAST_ROUNDS, MOST_ROUNDS = 4, 21
ROUND_SECONDS = 0.2
"""The seconds of one strategy's steps in a round; a round has one step where that takes longer."""
MOST_STEPS = 200
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The times that the steps of a strategy took."""

    rounds: tuple[float, ...]
    """The seconds of a step in each round, of the slowest rank, at the pace that the machine usually had (``race``)."""
    steps: int

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The (lower, median, upper) quartiles of the rounds."""
        low, middle, high = quantiles(self.rounds, n=4, method="inclusive")
        return low, middle, high


Choice = tuple[str, int]
"""A strategy as it is written, and the threads of each rank."""


@dataclass
class Bench:
    """A bench of strategies that are built side by side. All ranks call it in the same way; every decision is made of
    what all have gathered, so all make the same ones."""

    workload: Workload
    world: World
    refused: dict[str, str] = field(default_factory=dict)
    """The reason why a strategy cannot run this workload here, by strategy."""
    _steps: dict[Choice, Step | None] = field(default_factory=dict)
    _many: dict[Choice, int] = field(default_factory=dict)
    """The number of steps in a round, of each choice that has made some."""
    _taken: dict[Choice, Taken] = field(default_factory=dict)

    @collective
    def build(self, choice: Choice) -> bool:
        """Build the steps of a choice; those of a strategy of one process in rank 0. Returns False where it is
        refused."""
        strategy, threads = choice
        if choice in self._steps or strategy in self.refused:
            return choice in self._steps
        step, refusal = None, ""
        with _threads(threads):
            try:
                step = self._built(parse(strategy, "apportion.strategies"))
            except ValueError as error:
                refusal = str(error)
        refusals = list(filter(None, gather_messages(refusal, self.world.group(), device=self.world.device)))
        if refusals:
            if step is not None:
                step.close()
            self.refused[strategy] = refusals[0]
            return False
        self._steps[choice] = step
        return True

    def _built(self, strategy: Strategy) -> Step | None:
        endless = replace(self.workload, steps=MANY_STEPS, evaluation=None)
        if not strategy.one_process:
            return strategy.build(endless, self.world)
        return strategy.build(endless, World(device=self.world.device)) if self.world.rank == 0 else None

    @collective
    def measure(self, choices: Sequence[Choice], seconds: float) -> dict[Choice, Taken]:
        """Measure those choices that are built, in turns, for about ``seconds``, or until one is left that may come out
        first. Returns what all choices have taken that were ever measured here."""
        going = [choice for choice in choices if choice in self._steps]
        if len(going) < 2 and self._taken.keys() >= set(going):
            return dict(self._taken)  # no other candidate to run beside
        for choice in going:
            if choice not in self._many:
                self._warm_up(choice)
        rounds: dict[Choice, dict[int, float]] = {choice: {} for choice in going}
        spent = 0.0
        for done in range(MOST_ROUNDS):
            if done >= LEAST_ROUNDS:
                going = still_running(rounds, going)
                if len(going) < 2 or spent > seconds:
                    break
            for choice in going if done % 2 == 0 else reversed(going):
                took = self._go(choice, self._many[choice])
                rounds[choice][done] = took
                spent += took * self._many[choice]
        known = {choice: median(taken.rounds) for choice, taken in self._taken.items()}
        for choice, seconds_each in paced(rounds, known).items():
            before = self._taken.get(choice, Taken(rounds=(), steps=0))
            steps = before.steps + len(seconds_each) * self._many[choice]
            self._taken[choice] = Taken(rounds=(*before.rounds, *seconds_each), steps=steps)
        return dict(self._taken)

    def _warm_up(self, choice: Choice) -> None:
        self._go(choice, 1)
        once = self._go(choice, WARM_UP)
        self._many[choice] = max(1, min(MOST_STEPS, int(ROUND_SECONDS / max(once, 1e-6))))

    def _go(self, choice: Choice, many: int) -> float:
        """Make ``many`` steps and return the seconds of one of them, by the slowest rank."""
        step, took = self._steps[choice], 0.0
        self.world.group().barrier()
        if step is not None:
            with _threads(choice[1]):
                began = time.perf_counter()
                for batch in batches(step, stop=step.done + many):
                    step(batch)
                took = (time.perf_counter() - began) / many
        return float(max(gather_messages(took, self.world.group(), device=self.world.device)))

    def close(self) -> None:
        """Close the steps of all strategies."""
        for step in self._steps.values():
            if step is not None:
                step.source.close()
                step.close()
        self._steps.clear()


@contextmanager
def _threads(many: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if many != before:
        torch.set_num_threads(many)
    try:
        yield
    finally:
        if many != before:
            torch.set_num_threads(before)


# A race of candidates that make rounds in turns: who has clearly lost makes no more of them, so that the time goes to
# those between which the choice lies (a race as of Maron and Moore, "Hoeffding Races", 1994, by the sign test).
#
# The machine is faster at one time than at another, by more than two candidates differ. So a candidate that left early
# is judged by the rounds in which it ran beside the leader, and a later race by who ran in an earlier one, too.


Runner = TypeVar("Runner", bound=Hashable)
Rounds = Mapping[int, float]
"""The seconds of a candidate in each round that it made, by the number of the round."""


def beside(first: Rounds, second: Rounds) -> tuple[list[float], list[float]]:
    """Return the seconds of both in the rounds that both made."""
    both = sorted(first.keys() & second.keys())
    return [first[turn] for turn in both], [second[turn] for turn in both]


def leader(rounds: Mapping[Runner, Rounds]) -> Runner:
    """Return who takes the least time in the median of the rounds, of those that made most of them."""
    most = max(len(own) for own in rounds.values())
    return min((r for r, own in rounds.items() if len(own) == most), key=lambda r: median(rounds[r].values()))


def still_running(rounds: Mapping[Runner, Rounds], going: Sequence[Runner]) -> list[Runner]:
    """Return those of ``going``, which have made the same rounds so far, that may still come out first. One that is
    certainly slower than the leader, by a share of ``ALIKE`` or more, cannot."""
    first = min(going, key=lambda r: median(rounds[r].values()))

    def lost(other: Runner) -> bool:
        ahead, behind = beside(rounds[first], rounds[other])
        return faster_confidence(ahead, behind) >= SURE and median(behind) > (1 + ALIKE) * median(ahead)

    return [r for r in going if r == first or not lost(r)]


def paced(rounds: Mapping[Runner, Rounds], known: Mapping[Runner, float]) -> dict[Runner, list[float]]:
    """Return the seconds of each candidate in its rounds of a race, as they would be at the pace of the races before.
    ``known``: what candidates take at that pace; where none of them ran, the pace is what the leader had."""
    first = leader(rounds)
    before = [r for r in rounds if r in known]
    usual = median(rounds[first].values())
    if before:
        anchor = min(before, key=lambda r: known[r])
        own, others = beside(rounds[anchor], rounds[first])
        usual = known[anchor] * median(others) / median(own)
    return {r: _scaled(own, rounds[first], usual) for r, own in rounds.items()}


def _scaled(own: Rounds, first: Rounds, usual: float) -> list[float]:
    """Return a candidate's seconds at the pace at which the leader takes its usual seconds."""
    _, common = beside(own, first)
    return [seconds * usual / median(common) for seconds in own.values()]
