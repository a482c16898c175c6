"""A pilot that tests whether an approximate strategy learns enough for the time that it saves. It and an exact strategy
train from the same seed for the same time, in turns; what counts is the loss, on the same examples, at equal time.

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
"""The number of turns that the time of each training is divided into."""
LAST = 3
"""The number of the last turns whose losses are compared: the loss of a single turn may be high or low by chance."""
EXAMPLES = 1024
"""The number of examples that the loss is computed on at most."""


@dataclass(frozen=True, kw_only=True)
class Piloted:
    """The result of two trainings side by side."""

    exact: tuple[float, ...]
    """The loss of the exact strategy after each turn."""
    approximate: tuple[float, ...]
    steps: tuple[int, int]
    """The numbers of steps made by the exact strategy, and by the approximate one."""
    seconds: float
    """The seconds that each of them trained."""

    @property
    def better(self) -> bool:
        """Has the approximate strategy the lower loss at equal time?"""
        return lower(self.approximate, self.exact)

    @property
    def text(self) -> str:
        """The result in words."""
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
    """Train each for this many seconds, or all the ``steps`` that the training has. Raises ValueError where the
    workload has no loss to compare (``update=``), or either cannot run it."""
    with ExitStack() as stack:
        runners = []
        for candidate in (exact, approximate):
            group = TrialWorkers(candidate, workload, changes, steps=steps)
            stack.callback(group.pool.close)
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
    """Report whether the last of these losses are lower than the last of the others. A loss that is not a number is not
    lower."""
    mine, theirs = _last(losses), _last(others)
    return not math.isnan(mine) and (math.isnan(theirs) or mine < theirs)


def _last(losses: Sequence[float]) -> float:
    return fmean(losses[-LAST:])


class _Runner:
    """One of the two trainings, on its way."""

    def __init__(self, group: TrialWorkers) -> None:
        self._group = group
        self._left = int(group.built()["each"])
        self._group.loss(EXAMPLES)  # a workload without a loss is refused before anything is trained
        self._debt = 0.0
        self._a_step: float | None = None
        self.made = 0
        self.losses: list[float] = []

    def turn(self, seconds: float) -> None:
        """Train for this many seconds, less the time by which earlier turns were too long; then compute the loss."""
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
        if self.made:  # the first one sets up what the others use: that does not count as training
            self._debt -= took
        self._a_step = took / many
        self.made += many
