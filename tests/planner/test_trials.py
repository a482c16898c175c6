"""A predicted plan whose best few make real steps, and an approximate strategy that has to show what it learns."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from by_hand import chain, machine
from ranks import by_value
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from apportion.core.workload import Workload
from apportion.cost_model.profile import Profile
from apportion.planner import launched_choice
from apportion.planner.build import make
from apportion.planner.calibration import Correction
from apportion.planner.candidate import Measurement, Priced
from apportion.planner.plan import Plan
from apportion.planner.search import search
from apportion.planner.trials.measured_plan import after, tried
from apportion.planner.trials.trial import Measured, candidate
from apportion.planner.trials.tune import TuningResult, TuningTrial
from apportion.runtime.launch.local import Local
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.hogwild import Hogwild
from apportion.strategies.single_device import SingleDevice

pytestmark = pytest.mark.processes


class Rests(nn.Linear):
    """Takes as long for few rows as for many: who shares out a batch gains nothing, who has one of his own does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return super().forward(x)


def a_line() -> TensorDataset:
    x = torch.randn(640, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True) + 1)


def slowly(rate: float = 0.001, **changed: Any) -> Workload:
    """A step brings it nearer to the line by the same part: what counts is how many are made."""
    job = networks.workload(
        lambda: Rests(10, 1),
        a_line,
        64,
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=rate),
    )
    return replace(job, **{"steps": 100_000, **changed})


def predicted(seconds: float = 1e-3, **facts: Any) -> Plan:
    """For two cores, of a network that takes so long to compute and next to nothing to update."""
    cluster, profile = machine().cluster, replace(chain(seconds, parameter_bytes=88, kind="Linear"), **facts)
    found = search(profile, cluster, threads=1, strategies=["single_device", "data_parallel", "hogwild"])
    return make(found, profile, cluster, workload="work.py:workload")


def piloted(plan: Plan, workload: Workload) -> Plan:
    with by_value(networks), by_value(sys.modules[__name__]):
        return tried(plan, workload, allow_approximate=True, seconds=2.0, pilot_seconds=1.5)


@pytest.mark.thorough
def test_an_approximate_strategy_that_learns_more_in_the_same_time_is_chosen() -> None:
    """Two workers without locks make twice the steps."""
    plan = piloted(predicted(), slowly())
    assert plan.strategy == "hogwild"
    assert plan.launcher == "local(workers=2, threads=1)"
    assert not plan.chosen.strategy.exact
    assert plan.candidates[0] is plan.chosen
    assert plan.why[-1].startswith("pilot of hogwild on local(workers=2, threads=1): loss ")
    assert plan.why[-1].endswith("from the same seed: chosen")
    assert plan.reasons[0] == "chosen"
    assert "--strategy hogwild" in plan.commands.torchrun
    exact = [p for p in plan.candidates if p.strategy.exact and p.cost is not None]
    assert any(p.tried is not None for p in exact)


@pytest.mark.thorough
def test_one_that_is_faster_and_learns_no_more_is_not_chosen() -> None:
    """Its steps do nothing: as good is not better."""
    plan = piloted(predicted(), slowly(rate=0.0))
    assert plan.chosen.strategy.exact
    assert plan.why[-1].endswith(": not chosen")


@pytest.mark.thorough
def test_a_pilot_goes_no_further_than_the_training() -> None:
    """After 8 batches both are at the end, two workers without locks after 4 each."""
    plan = piloted(predicted(), slowly(steps=8, evaluation=None))
    found = re.search(r"loss (\S+) against (\S+) of the best exact one", plan.why[-1])
    assert found is not None, plan.why[-1]
    # 8 steps of a thousandth each leave most of the loss, which is near 12; in 1.5 s there is time for 300.
    assert min(float(found[1]), float(found[2])) > 9.0


def test_without_a_faster_approximate_strategy_there_is_no_pilot() -> None:
    plan = predicted()
    only = [p for p in plan.found if p.strategy.exact]
    told = piloted(make(only, plan.profile, plan.cluster), slowly())
    assert told.chosen.strategy.exact
    assert told.why[-1] == "no approximate strategy is faster per example: there is nothing to try in a pilot"


@pytest.mark.thorough
def test_what_cannot_be_piloted_is_told_and_the_exact_one_stays() -> None:
    plan = piloted(predicted(seconds=1e-6), networks.cases["two_optimizers"](16))
    assert plan.chosen.strategy.exact
    why = "update= has no loss that two strategies could be compared by"
    assert plan.why[-1].startswith(f"no pilot of hogwild on local(workers=2, threads=1): {why}")


def test_without_being_asked_nothing_approximate_is_chosen() -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        plan = tried(predicted(), slowly(), seconds=2.0)
    assert plan.chosen.strategy.exact
    assert not any("pilot" in line for line in plan.why)
    assert plan.chosen.tried is not None


# Among ranks that run already


def test_later_rounds_try_what_should_now_be_faster_beside_the_best_so_far() -> None:
    """What was tried comes by its measurement, and the rest by what is predicted now."""

    def offer(microbatches: int, predicted: float, measured: float | None = None) -> Priced:
        price = replace(a_price(DataParallel(microbatches=microbatches), 2), corrected=predicted)
        if measured is None:
            return price
        return replace(price, tried=Measurement(step_seconds=measured, low=measured, high=measured, steps=9))

    def later(*found: Priced) -> list[str]:
        plan = replace(predicted(), found=found)
        return [strategy for strategy, _ in launched_choice._worth_trying(plan, first=False)]

    slow, fast = offer(1, 0.5, measured=4.0), offer(2, 3.0, measured=2.0)
    hopeful, better = offer(4, 1.9), offer(8, 1.5)
    assert later(slow, hopeful, fast, better) == ["data_parallel(microbatches=2)", "data_parallel(microbatches=8)"]
    assert later(slow, fast, offer(4, 2.1)) == ["data_parallel(microbatches=2)"], "no other should be faster"
    assert later(slow, fast) == ["data_parallel(microbatches=2)"], "nothing is left"
    assert later(hopeful, better) == [], "the trials have refused everything that they began with"
    gone = replace(better, cost=None, refusal="no")
    assert later(slow, gone, fast) == ["data_parallel(microbatches=2)"]


# What a trial has shown


def refined(*some: TuningTrial) -> TuningResult:
    return TuningResult(tried=some, chosen=some[0], confidence=1.0, correction=Correction(2.0, 3.0), seconds=1.0)


def a_price(strategy: Any, ranks: int) -> Priced:
    seen: Profile = chain(2.0, parameter_bytes=10**9)
    layout = machine(ranks)
    return Priced(strategy=strategy, layout=layout, cost=strategy.cost(seen, layout))


def test_what_was_measured_is_taken_what_was_refused_has_no_price_and_the_rest_is_corrected() -> None:
    alone, both, free = a_price(SingleDevice(), 1), a_price(DataParallel(), 2), a_price(Hogwild(), 2)
    where = Local(workers=1, threads=1)
    measured = Measured(candidate(SingleDevice(), where), seconds=[4.0, 1.0, 2.0, 3.0, 5.0], examples=500)
    found = refined(
        TuningTrial(strategy=SingleDevice(), launcher=where, predicted=None, measured=measured),
        TuningTrial(
            strategy=DataParallel(), launcher=Local(workers=2, threads=1), predicted=None, measured=None, refused="no"
        ),
    )
    shown = after(alone, found)
    assert shown.tried is not None
    assert (shown.tried.low, shown.step_seconds, shown.tried.high, shown.tried.steps) == (2.0, 3.0, 4.0, 5)
    refused = after(both, found)
    assert (refused.cost, refused.refusal) == (None, "no")
    assert after(refused, found) is refused
    assert free.cost is not None
    sent = free.cost.terms["communicating"]
    assert after(free, found).step_seconds == pytest.approx(2 * (free.cost.step_seconds - sent) + 3 * sent)
