"""Predict, then try: what is tried, what it teaches, and what is chosen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import networks
import pytest
from ranks import by_value

import apportion
from apportion.core.strategy import Strategy
from apportion.core.value import parse
from apportion.cost_model.cost import Cost
from apportion.planner.calibration import MOST, Correction, Trial, correction
from apportion.planner.trials.significance import SURE, faster_confidence
from apportion.planner.trials.trial import Candidate, Measured, candidate
from apportion.planner.trials.tune import TuningTrial, choose, refine, surprising, worth_trying
from apportion.runtime.launch.local import Local
from apportion.strategies.single_device import SingleDevice


def cost(computing: float, communicating: float = 0.0, examples: float = 64) -> Cost:
    return Cost(terms={"computing": computing, "communicating": communicating}, examples=examples)


def offer(strategy: str, launcher: str, price: Cost | None = None) -> Candidate:
    where: Local = parse(launcher, "apportion.runtime.launch")
    return candidate(parse(strategy, "apportion.strategies"), where, price)


ALONE, ONE_THREAD = "local(workers=1, threads=4)", "local(workers=1, threads=1)"
TWO, FOUR = "local(workers=2, threads=2)", "local(workers=4, threads=1)"


# Telling apart


@pytest.mark.parametrize(
    ("won", "lost", "sure"), [(3, 0, False), (4, 0, True), (8, 2, True), (7, 3, False), (14, 6, True), (10, 10, False)]
)
def test_rounds_that_took_turns_tell_apart_what_a_coin_would_not(won: int, lost: int, sure: bool) -> None:
    first = [1.0] * won + [1.2] * lost
    assert (faster_confidence(first, [1.1] * (won + lost)) >= SURE) == sure


def test_the_sign_test_is_the_binomial() -> None:
    assert faster_confidence([1, 1, 1, 3], [2, 2, 2, 2]) == pytest.approx(1 - (4 + 1) / 16)
    assert faster_confidence([1.0, 1.0], [1.0, 1.0]) == 0.0, "equal rounds say nothing"
    assert faster_confidence([], []) == 0.0


# Refitting


def factored(name: str, predicted: Cost, computing: float, communicating: float) -> Trial:
    """It took so many times as long as predicted."""
    parts = predicted.terms["computing"], predicted.terms["communicating"]
    return Trial(name, predicted, computing * parts[0] + communicating * parts[1])


def test_factors_of_computing_and_of_communicating_are_found() -> None:
    tried = [
        factored("single_device", cost(1.0), 1.3, 1.0),
        factored("data_parallel", cost(0.5, 0.2), 1.3, 2.0),
        factored("fully_sharded", cost(0.3, 0.4), 1.3, 2.0),
    ]
    found = correction(tried)
    assert found.computing == pytest.approx(1.3, rel=0.05)
    assert found.communicating == pytest.approx(2.0, rel=0.05), "two agree: so it is for the rest"
    assert found.own == pytest.approx({"data_parallel": 2.0, "fully_sharded": 2.0}, rel=0.05)


def test_what_one_strategy_waits_for_says_nothing_of_another() -> None:
    """The digits on two cores, in ms: single_device is measured with both updates, data_parallel takes half as long
    again as it should; tensor_parallel was not tried, and took 1.0 to 1.4."""
    alone = [Trial("single_device", cost(p), m) for p, m in ((1.2, 1.42), (0.993, 1.213))]
    towers, slices = cost(1.0, 0.099), cost(0.789, 0.664)
    found = correction([*alone, Trial("data_parallel", towers, 1.575)])
    assert found.computing == pytest.approx(1.2, rel=0.05)
    assert found.communicating == 1.0
    assert found.own["data_parallel"] > 3
    assert found.step_seconds("tensor_parallel", slices) < 1.2 * slices.step_seconds
    assert found.step_seconds("data_parallel", towers) > 1.35 * towers.step_seconds


def test_several_values_of_one_strategy_are_one_witness() -> None:
    tried = [Trial("single_device", cost(1.0), 1.0)]
    tried += [factored("data_parallel", cost(0.5, sent), 1.0, 3.0) for sent in (0.2, 0.3, 0.4)]
    found = correction(tried)
    assert found.communicating == 1.0
    assert found.own["data_parallel"] == pytest.approx(3.0, rel=0.05)


def test_of_two_that_agree_in_part_the_rest_takes_that_part() -> None:
    tried = [
        Trial("single_device", cost(1.0), 1.0),
        factored("data_parallel", cost(0.5, 0.4), 1.0, 3.0),
        factored("fully_sharded", cost(0.5, 0.4), 1.0, 1.5),
    ]
    found = correction(tried)
    assert found.communicating == pytest.approx(1.5, rel=0.05)
    assert found.own["data_parallel"] == pytest.approx(3.0, rel=0.05)
    against = correction([*tried[:2], factored("fully_sharded", cost(0.5, 0.4), 1.0, 0.5)])
    assert against.communicating == 1.0, "one waits longer, one less long"


def test_one_that_is_far_off_does_not_move_the_others() -> None:
    tried = [Trial("single_device", cost(p), m) for p, m in ((1.0, 1.1), (2.0, 2.2), (3.0, 3.3), (1.0, 9.0))]
    assert correction(tried).computing == pytest.approx(1.1, rel=0.03)


def test_what_no_trial_tells_stays_as_it_was_predicted() -> None:
    assert correction([]) == Correction(1.0, 1.0)
    alone = correction([Trial("single_device", cost(1.0), 1.5)])
    assert (alone.communicating, alone.own) == (pytest.approx(1.0), {})
    assert correction([Trial("single_device", cost(1.0), 100.0)]).computing == pytest.approx(MOST)


# What is tried


def many() -> list[Candidate]:
    return [
        offer("pipeline_parallel", TWO, cost(0.5)),
        offer("tensor_parallel", TWO, cost(0.6)),
        offer("data_parallel(microbatches=2)", TWO, cost(0.7)),
        offer("fully_sharded", TWO, cost(0.8)),
        offer("data_parallel", FOUR, cost(1.2)),
        offer("data_parallel", TWO, cost(0.9)),
        offer("single_device", ONE_THREAD, cost(4.0)),
        offer("single_device", ALONE, cost(2.0)),
        offer("single_device(fused=True)", ALONE, cost(2.0)),
    ]


def test_the_best_three_one_process_with_all_threads_and_plain_data_parallel_are_always_tried() -> None:
    assert list(map(str, worth_trying(many()))) == [
        f"single_device on {ALONE}",
        f"pipeline_parallel on {TWO}",
        f"tensor_parallel on {TWO}",
        f"data_parallel(microbatches=2) on {TWO}",
        f"data_parallel on {TWO}",
        f"single_device(fused=True) on {ALONE}",
    ]


def test_without_predictions_all_are_tried() -> None:
    offers = [candidate(o.strategy, o.launcher) for o in many()]
    assert {*map(str, worth_trying(offers))} == {*map(str, offers)}
    assert str(worth_trying(offers)[0]) == f"single_device on {ALONE}"


def test_what_should_now_be_the_fastest_is_tried_too() -> None:
    offers = [offer("data_parallel", TWO, cost(0.5, 0.5)), offer("fully_sharded", TWO, cost(1.1))]
    known = [str(offers[0])]
    assert surprising(offers, known, Correction(1.0, 3.0), 2.0 / 64) is offers[1], "1.1 s is less than the 2 measured"
    assert surprising(offers, known, Correction(2.0, 1.0), 2.0 / 64) is None
    assert surprising(offers, [*known, str(offers[1])], Correction(), 2.0 / 64) is None, "once"


# What is chosen


def tried(strategy: str, launcher: str, rounds: Sequence[float], first: int = 0) -> TuningTrial:
    given = offer(strategy, launcher)
    measured = Measured(
        candidate(given.strategy, given.launcher),
        seconds=list(rounds),
        rounds=dict(enumerate(rounds, first)),
        examples=64 * len(rounds),
    )
    return TuningTrial(strategy=given.strategy, launcher=given.launcher, predicted=None, measured=measured)


def test_of_those_that_cannot_be_faster_confidence_the_simplest_is_chosen() -> None:
    two = tried("data_parallel", TWO, [1.0, 1.02, 1.0, 1.02, 1.0])
    fused = tried("single_device(fused=True)", ALONE, [1.01, 1.01, 1.01, 1.01, 1.02])
    plain = tried("single_device", ALONE, [1.02, 1.01, 1.0, 1.03, 1.01])
    chosen, confidence = choose([two, fused, plain])
    assert chosen is plain
    assert confidence < SURE


def test_who_is_faster_in_every_round_is_chosen_though_by_little() -> None:
    two = tried("data_parallel", TWO, [1.0, 1.1, 1.0, 1.2, 1.0, 1.1])
    plain = tried("single_device", ALONE, [1.01, 1.11, 1.01, 1.21, 1.01, 1.12])
    chosen, confidence = choose([two, plain])
    assert chosen is two
    assert confidence >= SURE


def test_who_is_much_faster_is_chosen_after_the_fewest_rounds() -> None:
    two = tried("data_parallel", TWO, [1.0, 1.0])
    assert choose([two, tried("single_device", ALONE, [1.4, 1.4])])[0] is two


def test_only_rounds_that_were_made_in_turns_are_held_against_each_other() -> None:
    two = tried("data_parallel", TWO, [1.0, 1.0, 1.0, 1.0])
    later = tried("single_device", ALONE, [1.01, 1.01, 1.01, 1.01], first=4)
    chosen, confidence = choose([two, later])
    assert confidence == 0.0
    assert chosen is later


# Real processes


def refined(workload: Any, offers: Sequence[Candidate], **options: Any) -> Any:
    with by_value(networks), by_value(sys.modules[__name__]):
        return refine(offers, workload, {}, seconds=5.0, **options)


@pytest.mark.processes
def test_candidates_make_real_steps_and_the_fastest_first() -> None:
    offers = [
        offer("single_device", ONE_THREAD, cost(0.001)),
        offer("data_parallel", "local(workers=2, threads=1)", cost(0.001, 0.001)),
        offer("fully_sharded", "local(workers=2, threads=1)", cost(0.002, 0.002)),
    ]
    found = refined(networks.cases["mlp"](64), offers)
    speeds = [t.measured.seconds_per_example for t in found.tried]
    assert speeds == sorted(speeds)
    assert len(found.tried) == 3
    assert all(len(t.measured.seconds) >= 4 for t in found.tried)
    assert str(found.chosen) in {*map(str, offers)}
    assert found.correction != Correction()


@pytest.mark.processes
def test_what_cannot_run_is_told_with_its_reason_and_what_fails_does_not_end_the_trial() -> None:
    offers = [offer("single_device", ONE_THREAD), offer("data_parallel", "local(workers=2, threads=1)")]
    found = refined(networks.cases["mlp"](1), offers)
    assert [t.refused is None for t in found.tried] == [True, False]
    assert "cannot feed 2 workers" in found.tried[1].refused
    assert isinstance(found.chosen.strategy, SingleDevice)


def raises(outputs: Any, targets: Any) -> Any:
    raise KeyError("no such loss")


@pytest.mark.processes
def test_a_workload_that_nothing_can_run_is_told_as_its_own_error() -> None:
    from dataclasses import replace

    offers = [offer("single_device", ONE_THREAD), offer("data_parallel", "local(workers=2, threads=1)")]
    with pytest.raises(apportion.WorkerFailed, match="no such loss"):
        refined(replace(networks.cases["mlp"](64), loss=raises), offers)


@pytest.mark.processes
def test_approximate_ones_are_not_tried() -> None:
    offers = [offer("single_device", ONE_THREAD, cost(1.0)), offer("hogwild", TWO, cost(0.1))]
    found = refined(networks.cases["mlp"](64), offers)
    kinds: list[Strategy] = [t.strategy for t in found.tried]
    assert kinds == [SingleDevice()]
