"""What a worker times of rollouts of another size: a step of their environments, and the batch to learn from."""

from __future__ import annotations

import time
from statistics import median
from typing import final

import numpy as np

from apportion.comm.channel import Message
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.profiler.profiled_step import TimedStep

LENGTHS, SLOW_LENGTHS = (5, 20), (1, 3)
"""The steps of the rollouts that are played, in turn: the difference between two lengths tells what a step takes beside
the environments and the network, and what a rollout does. The second pair is for slow steps."""
SLOW_STEP_SECONDS = 2e-3
"""The seconds of a step from which it is slow: what Python does beside it is little."""
MOST_ROLLOUTS = 2000
FIRST_NUMBER = 1 << 30
"""The number of the first rollout that is played here: rollouts are drawn by their numbers, and the steps of a training
do not come so far."""


@final
class RolloutTimer:
    """Rollouts of the workload's own network and environments."""

    def __init__(self, own: TimedStep, world: World) -> None:
        dataset: object = own.step.source.dataset
        assert isinstance(dataset, Rollouts), "only what a network plays has rollouts"
        self._own, self._world, self._rollouts = own, world, dataset

    def batch(self, environments: int, steps: int) -> Batch:
        """Return a batch of one rollout of this size, for which nothing is played."""
        source = self._own.step.source
        found = tree.cast(self._rollouts.shaped(environments, steps), source.device, source.dtype)
        return self._own.rows(1).replace(inputs=found[0], targets=found[1])

    def played(self, environments: int, seconds: float) -> Message:
        """Play this number of environments for ``seconds``: the seconds of a step in the environments
        (``environment``), of acting (``acting``) and beside both (``beside``), and those of a rollout beside its steps
        (``a_rollout``); ``opening``: those before the first step. ``refused``: the reason why that many cannot be
        opened."""
        mine = self._rollouts
        began = time.perf_counter()
        other = mine if environments == mine.environments else mine.resized(environments)
        steps = other.steps
        try:
            refused = ""
            try:
                other.steps = 1
                self._one(other, FIRST_NUMBER)
            except Exception as error:  # whatever environments fail with, the plan of the workload's own number goes on
                refused = str(error) or type(error).__name__
            opening = time.perf_counter() - began
            self._world.group().barrier()
            if refused:
                return {"refused": refused}
            return {"refused": "", "opening": opening, **self._for(other, seconds)}
        finally:
            other.steps = steps
            if other is not mine:
                other.close()

    def _for(self, rollouts: Rollouts, seconds: float) -> dict[str, float]:
        """Play rollouts of two lengths in turn for ``seconds``, one of each at least."""
        environment = acting = 0.0
        played, end = 0, time.perf_counter() + seconds
        rollouts.steps = 1
        first = self._one(rollouts, FIRST_NUMBER + 1)
        lengths = SLOW_LENGTHS if sum(first) > SLOW_STEP_SECONDS else LENGTHS
        besides: dict[int, list[float]] = {steps: [] for steps in lengths}
        for number in range(MOST_ROLLOUTS):
            rollouts.steps = steps = lengths[number % 2]
            moving, acted, beside = self._one(rollouts, FIRST_NUMBER + 2 + number)
            environment, acting, played = environment + moving, acting + acted, played + steps
            besides[steps].append(beside)
            if number and time.perf_counter() > end:
                break
        short, long = (median(besides[steps]) for steps in lengths)
        a_step = max(0.0, (long - short) / (lengths[1] - lengths[0]))
        return {
            "environment": environment / played,
            "acting": acting / played,
            "beside": a_step,
            "a_rollout": max(0.0, short - lengths[0] * a_step),
        }

    def _one(self, rollouts: Rollouts, number: int) -> tuple[float, float, float]:
        """Play a rollout, as it is loaded; returns its seconds in the environments, of acting, and beside both."""
        source = self._own.step.source
        rollouts.rollout_facts()
        began = time.perf_counter()
        tree.cast(rollouts.act(np.zeros(1, dtype=np.int64), number), source.device, source.dtype)
        whole = time.perf_counter() - began
        times = rollouts.rollout_facts()
        return times["environment"], times["acting"], whole - times["environment"] - times["acting"]
