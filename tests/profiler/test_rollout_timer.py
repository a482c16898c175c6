"""Rollouts that are played to be timed: environments are opened, played and closed, and what is learnt from is made."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import played
import pytest
import torch

from apportion.comm.world import World
from apportion.core import tree
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.profiler.profiled_step import TimedStep
from apportion.profiler.rollouts.timer import RolloutTimer

OPEN: Counter[str] = Counter()


class Counted(played.Drift):
    """An environment that is counted while it is open, and its steps. There are 12 at the most."""

    def __init__(self) -> None:
        super().__init__()
        if OPEN["now"] >= 12:
            raise OSError("there are no more of them")
        OPEN["now"] += 1

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        OPEN["steps"] += 1
        return super().step(action)

    def close(self) -> None:
        OPEN["now"] -= 1


@pytest.fixture
def timer() -> RolloutTimer:
    """Of one actor with four environments, which are open, in rollouts of six steps."""
    OPEN.clear()
    threads = torch.get_num_threads()
    own = TimedStep(played.workload(environment=Counted, actors=1), World.from_env(device="cpu"))
    own.batch.inputs  # noqa: B018 (its environments are opened)
    torch.set_num_threads(threads)
    return RolloutTimer(own, World.from_env(device="cpu"))


def test_other_environments_are_closed_when_they_were_played(timer: RolloutTimer) -> None:
    assert OPEN["now"] == 4
    told = timer.played(2, 0.01)
    assert OPEN["now"] == 4
    assert told["refused"] == ""
    assert min(told[name] for name in ("environment", "acting", "opening")) > 0
    assert min(told[name] for name in ("beside", "a_rollout")) >= 0


def test_the_workloads_own_environments_are_played_as_they_are_and_stay_open(timer: RolloutTimer) -> None:
    timer.played(4, 0.01)
    assert OPEN["now"] == 4
    assert timer._rollouts.steps == 6, "the length of its rollouts is as it was"


def test_environments_that_do_not_open_are_told_with_the_reason_and_leave_nothing(timer: RolloutTimer) -> None:
    assert timer.played(16, 0.01) == {"refused": "there are no more of them"}
    assert OPEN["now"] <= 12
    assert timer.played(2, 0.01)["refused"] == "", "and the next number is played"


@pytest.mark.parametrize("size", [(1, 6), (4, 6), (3, 2), (16, 24)])
def test_a_batch_of_any_size_is_learnt_from_and_nothing_is_played_for_it(
    timer: RolloutTimer, size: tuple[int, int]
) -> None:
    before = OPEN["steps"]
    batch = timer.batch(*size)
    assert OPEN["steps"] - before <= 6, "one environment has played a rollout at the most"
    environments, steps = size
    assert len(batch) == 1
    assert batch.inputs.observations.shape == (1, steps + 1, environments, played.NUMBERS)
    assert batch.targets["rewards"].shape == (1, steps, environments)
    assert bool(torch.isfinite(timer._own.step.backward(batch)))


def test_an_example_of_its_own_size_is_the_one_that_is_made_without_the_network() -> None:
    rollouts = Rollouts(played.Drift, actors=1, environments=3, steps=20)
    made, shaped = rollouts._sample(1), rollouts.shaped(3, 20)
    for one, other in zip(tree.tensors(made), tree.tensors(shaped), strict=True):
        assert torch.equal(one, other)
    assert len(made[0].last[0]) > 0, "an episode was cut, and its last observation is known"


def test_rollouts_of_another_size_are_those_that_were_asked_for() -> None:
    """As if the workload had these numbers itself."""
    own = replace(played.workload(actors=1, environments=2, steps=9), evaluation=None)
    other = played.workload(actors=1, environments=4, steps=6).with_data(lambda data: data.resized(2, steps=9))
    first, second = (TimedStep(w, World.from_env(device="cpu")).batch for w in (own, other))
    for one, two in zip(tree.tensors(first.inputs), tree.tensors(second.inputs), strict=True):
        assert torch.equal(one, two)
