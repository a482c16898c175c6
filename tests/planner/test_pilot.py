"""An approximate strategy against an exact one: the loss at equal time, from the same seed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import networks
import played
import pytest
from ranks import by_value
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from apportion.core.value import parse
from apportion.core.workload import Evaluation, Workload
from apportion.planner.trials.measured_plan import TURNS, Piloted, _Runner, lower, pilot
from apportion.planner.trials.trial import Candidate, candidate
from apportion.runtime.launch.local import Local

pytestmark = pytest.mark.processes


def of(strategy: str, workers: int) -> Candidate:
    return candidate(parse(strategy, "apportion.strategies"), Local(workers=workers, threads=1, device="cpu"))


def digits() -> TensorDataset:
    """As in examples/digits.py."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def learning(**changed: Any) -> Workload:
    job = networks.workload(
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        digits,
        64,
        loss=F.cross_entropy,
        precision="float32",
        evaluation=Evaluation(data=digits),
    )
    return replace(job, **changed)


def piloted(job: Workload, approximate: str, *, steps: int = 100_000, seconds: float = 1.5) -> Piloted:
    with by_value(networks), by_value(sys.modules[__name__]):
        return pilot(of("single_device", 1), of(approximate, 2), job, {}, steps=steps, seconds=seconds)


@pytest.mark.parametrize("approximate", ["local_sgd", "hogwild"])
@pytest.mark.thorough
def test_both_learn_the_digits_for_the_same_time_and_are_held_against_each_other(approximate: str) -> None:
    found = piloted(learning(), approximate)
    for losses in (found.exact, found.approximate):
        assert len(losses) == TURNS
        assert losses[-1] < losses[0] < 2.4
    assert min(found.steps) > TURNS
    assert found.better == lower(found.approximate, found.exact)
    assert "from the same seed" in found.text


@pytest.mark.thorough
def test_the_training_ends_where_it_has_no_more_steps() -> None:
    found = piloted(learning(), "local_sgd", steps=24)
    assert found.steps[0] == 24
    assert found.exact[-1] == found.exact[-2]


def test_who_learns_nothing_of_its_speed_is_not_better() -> None:
    assert lower([2.0, 1.0, 0.9, 0.8], [2.0, 1.2, 1.1, 1.0])
    assert not lower([2.0, 1.2, 1.1, 1.0], [2.0, 1.0, 0.9, 0.8])
    assert not lower([1.0] * 4, [1.0] * 4), "as good is not better"
    assert lower([9.0, 0.8, 0.9, 0.8], [0.1, 1.0, 0.7, 1.0]), "the last turns count, together"
    assert not lower([math.nan] * 4, [1.0] * 4)
    assert lower([1.0] * 4, [math.nan] * 4)


@pytest.mark.thorough
def test_what_a_network_that_acts_has_learnt_is_not_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is said before anything is trained."""
    monkeypatch.setattr(_Runner, "_train", lambda _: pytest.fail("a training without a loss to compare"))
    with by_value(played), pytest.raises(ValueError, match="is its score, and not a loss on the same examples"):
        pilot(of("single_device", 1), of("hogwild", 2), played.good, {}, steps=1000, seconds=1.0)


@pytest.mark.thorough
def test_without_a_loss_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Runner, "_train", lambda _: pytest.fail("a training without a loss to compare"))
    with by_value(networks), pytest.raises(ValueError, match="no loss that two strategies could be compared by"):
        pilot(
            of("single_device", 1), of("data_parallel", 2), networks.cases["two_optimizers"](16), {}, steps=100,
            seconds=1.0,
        )  # fmt: skip
