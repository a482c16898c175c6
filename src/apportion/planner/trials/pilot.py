"""Does an approximate strategy learn enough of what it is faster by? Both train from the same seed for the same time,
in turns; what counts is the loss, on the same examples, at equal time.

::

    exact        train | loss |               | train | loss |              ...
    approximate               | train | loss |               | train | loss ...
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from apportion.core.workload import Workload
from apportion.planner.trials.trial import Candidate, TrialWorkers

TURNS = 12
"""That the time of each is divided in."""
LAST = 3
"""Turns whose losses are compared: one alone may lie by chance where it lies."""
EXAMPLES = 1024
"""That the loss is of."""


@dataclass(frozen=True, kw_only=True)
class Piloted:
    """Two trainings side by side."""

    exact: tuple[float, ...]
    """The loss after each turn."""
    approximate: tuple[float, ...]
    steps: tuple[int, int]
    """Made by the exact one, and by the approximate one."""
    seconds: float
    """That each of them trained."""

    @property
    def better(self) -> bool:
        """Has the approximate one the lower loss at equal time?"""
        return lower(self.approximate, self.exact)

    @property
    def text(self) -> str:
        """What came out."""
        after = f"after {self.seconds:.1f} s each"
        losses = f"{_last(self.approximate):.4g} against {_last(self.exact):.4g}"
        return f"loss {losses} of the best exact one {after}, from the same seed"


def pilot(
    exact: Candidate,
    approximate: Candidate,
    workload: Workload | str,
    changes: Mapping[str, Any],
    *,
    steps: int,
    seconds: float,
) -> Piloted:
    """Train both for so many seconds, or the whole of the ``steps`` that the training has. ValueError where the
    workload has no loss to compare (``update=``), or either cannot run it."""
    with ExitStack() as stack:
        runners = []
        for candidate in (exact, approximate):
            group = TrialWorkers(candidate, workload, changes, steps=steps)
            stack.callback(group.crew.close)
            runners.append(_Runner(group))
        for _ in range(TURNS):
            for runner in runners:
                runner.turn(seconds / TURNS)
    first, second = runners
    return Piloted(
        exact=tuple(first.losses),
        approximate=tuple(second.losses),
        steps=(first.made, second.made),
        seconds=seconds,
    )


def lower(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Are the last of these lower than the last of the others? What is no number is not."""
    mine, theirs = _last(losses), _last(others)
    return not math.isnan(mine) and (math.isnan(theirs) or mine < theirs)


def _last(losses: Sequence[float]) -> float:
    return fmean(losses[-LAST:])


class _Runner:
    """One of the two, on its way."""

    def __init__(self, group: TrialWorkers) -> None:
        self._group = group
        self._left = int(group.built()["each"])
        self._debt = 0.0
        self._a_step: float | None = None
        self.made = 0
        self.losses: list[float] = []

    def turn(self, seconds: float) -> None:
        """So many seconds of training; what a turn took too long, the next has less. Then the loss."""
        self._debt += seconds
        while self._debt > 0 and self._left:
            self._train()
        self.losses.append(self._group.loss(EXAMPLES))

    def _train(self) -> None:
        many = 1 if self._a_step is None else max(1, int(self._debt / self._a_step))
        many = min(many, self._left, 10 * max(1, self.made))  # the first steps are slow, and say little
        began = time.perf_counter()
        self._group.go(many)
        took = time.perf_counter() - began
        self._left -= many
        if self.made:  # the first one sets up what the others use: that is no time of training
            self._debt -= took
        self._a_step = took / many
        self.made += many
