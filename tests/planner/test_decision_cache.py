"""What a run tells of what it decided, and what trials teach: decisions, without a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from by_hand import machine

from apportion.core.strategy import Strategy
from apportion.core.value import parse
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Pass
from apportion.planner import auto
from apportion.planner.auto import _Deciding, _few, _pilot_sentence, _priced_rows, _tried_rows, _why
from apportion.planner.calibration import Correction, Trial, correction, divided
from apportion.planner.predict import _layout
from apportion.planner.trials.measured_plan import LAST, Piloted
from apportion.planner.trials.significance import SURE
from apportion.planner.trials.trial import Candidate, Measured, candidate
from apportion.planner.trials.tune import TuningResult, TuningTrial, choose, surprising
from apportion.profiler.measure_workload import Found, made, mean, scaled
from apportion.runtime.launch.local import Local


def cost(computing: float, examples: float = 64, **terms: float) -> Cost:
    return Cost(terms={"computing": computing, **terms}, examples=examples)


def strategy(name: str) -> Strategy:
    return parse(name, "apportion.strategies")


def offer(name: str, price: Cost | None = None, workers: int = 2) -> Candidate:
    where = Local(workers=workers, threads=1)
    return Candidate(strategy=strategy(name), launcher=where, ranks=workers, cost=price)


def tried(name: str, rounds: Sequence[float] | None, *, workers: int = 2, predicted: Cost | None = None) -> TuningTrial:
    """None: it was refused."""
    given = offer(name, workers=workers)
    measured = None
    if rounds is not None:
        who = candidate(given.strategy, given.launcher)
        measured = Measured(who, seconds=[*rounds], rounds=dict(enumerate(rounds)), examples=64 * len(rounds))
    refused = "no" if rounds is None else None
    return TuningTrial(
        strategy=given.strategy, launcher=given.launcher, predicted=predicted, measured=measured, refused=refused
    )


# What is told


def test_prices_are_told_exact_ones_first_each_kind_by_its_examples() -> None:
    some = [
        offer("local_sgd", cost(1.0, 128)),
        offer("hogwild", cost(0.9, 64)),
        offer("data_parallel", cost(2.0, 128)),
        offer("fully_sharded", cost(0.9, 64)),
        offer("tensor_parallel"),
    ]
    told = _priced_rows(some)
    assert [row["strategy"] for row in told] == ["fully_sharded", "data_parallel", "local_sgd", "hogwild"]
    assert [row["predicted_seconds"] for row in told] == [0.9, 2.0, 1.0, 0.9]
    assert [row["exact"] for row in told] == [True, True, False, False]


def test_what_was_tried_comes_before_what_was_priced_and_what_was_refused_after_it() -> None:
    found = [tried("data_parallel", [0.5] * 3, predicted=cost(0.4)), tried("map_reduce", None)]
    some = [offer(name, cost(1.0)) for name in ("data_parallel", "map_reduce", "fully_sharded")]
    told = _tried_rows(found, some)
    assert [row["strategy"] for row in told] == ["data_parallel", "fully_sharded", "map_reduce"]
    assert [(row["predicted_seconds"], row["step_seconds"]) for row in told] == [(0.4, 0.5), (1.0, None), (None, None)]
    assert [row["refused"] for row in told] == [None, None, "no"]
    assert told[0]["examples_per_second"] == 128.0


def test_why_it_was_taken_says_how_sure_that_is() -> None:
    first, second = tried("data_parallel", [0.5] * 3), tried("single_device", [0.6] * 3, workers=1)

    def why(chosen: TuningTrial, confidence: float, *some: TuningTrial) -> str:
        return _why(
            TuningResult(tried=some, chosen=chosen, confidence=confidence, correction=Correction(), seconds=1.0)
        )

    assert why(first, 0.99, first, second) == "the fastest, 500 ms a step"
    assert why(first, 0.5, first, second).endswith(", though it cannot be distinguished from the next")
    assert why(second, 0.5, first, second).startswith("600 ms a step, and the simplest of those")
    assert why(first, 1.0, first, tried("map_reduce", None)) == "500 ms a step, and nothing else could run"


def test_a_pilot_that_could_not_be_is_told_of_and_one_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster approximate one is tried; the exact one that is taken in the end says why."""
    first, other = tried("data_parallel", (0.5,)), offer("hogwild", cost(0.1, 64))
    refined = TuningResult(tried=[first], chosen=first, confidence=1.0, correction=Correction(), seconds=1.0)
    deciding = object.__new__(_Deciding)
    deciding._workload, deciding._changes, deciding._steps = "work.py:workload", {}, 100

    def why(outcome: Piloted | Exception) -> str:
        def told(*_: Any, **__: Any) -> Piloted:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(auto, "pilot", told)
        return _pilot_sentence(deciding._pilot([other], refined, 1.0))

    same = (1.0,) * LAST
    assert why(Piloted(exact=same, approximate=same, steps=(3, 3), seconds=1.0)) == (
        "; hogwild learned no more in the same time"
    )
    assert why(ValueError("there is no loss\nand more lines")) == "; no pilot of hogwild: there is no loss"
    assert _pilot_sentence(deciding._pilot([], refined, 1.0)) == "", "there is none to try"


def test_a_short_time_is_for_so_many_candidates_and_a_long_one_for_all() -> None:
    assert [_few(n) for n in (2, 5, 6, 100)] == [2, 5, None, None]


# What is chosen


def test_the_fewest_processes_are_the_simplest_whatever_they_are_called() -> None:
    short, long = (
        tried("map_reduce", [1.0, 1.01, 1.0]),
        tried("single_device(fused=True)", [1.01, 1.0, 1.01], workers=1),
    )
    assert choose([short, long])[0] is long


def test_rounds_are_held_against_each_other_by_the_example() -> None:
    """1.5 s for 128 examples, and 1 s for 64."""
    twice = tried("fully_sharded", [1.5] * 5)
    assert twice.measured is not None
    twice.measured.examples *= 2
    chosen, confidence = choose([twice, tried("data_parallel", [1.0] * 5)])
    assert chosen is twice
    assert confidence >= SURE


def test_what_comes_into_question_is_judged_by_the_example() -> None:
    """1 s for 64 examples; 1.5 s for 128."""
    few, many = offer("data_parallel", cost(1.0)), offer("fully_sharded", cost(1.5, 128))
    assert surprising([few, many], [], Correction(), 1.2 / 64) is many
    assert surprising([few], [], Correction(), 1.0 / 64) is None, "as fast is not faster"
    assert surprising([few, many], [], Correction(), None) is None


def test_waiting_is_learnt_with_what_is_sent() -> None:
    assert divided(cost(1.0, updating=0.5, communicating=0.25, waiting=0.25, bubble=2.0)) == (3.5, 0.5)


def test_of_factors_that_explain_as_much_the_one_next_to_1_is_taken() -> None:
    for other in (3.0, 1 / 3):
        some = [Trial("single_device", cost(1.0), seconds) for seconds in (1.0, other)]
        assert correction(some).computing == pytest.approx(1.0)
    some = [Trial("single_device", cost(1.0), seconds) for seconds in (1.5, 3.0)]
    assert correction(some).computing == pytest.approx(1.5, rel=0.03)
    assert correction([Trial("single_device", cost(1.0), 0.01)]).computing == pytest.approx(0.25)


def test_where_nobody_sends_nothing_is_learnt_of_sending() -> None:
    found = correction(
        [Trial("single_device", cost(1.0), 2.0), Trial("data_parallel", cost(1.0, communicating=0.5), 3.0)]
    )
    assert set(found.own) == {"data_parallel"}


# Where a candidate is


def test_candidates_are_on_a_gpu_each_or_all_on_the_cores() -> None:
    gpus = machine(2, kind="cuda").cluster
    cluster = replace(gpus, devices=(*gpus.devices, *machine(4).cluster.devices))

    def places(workers: int, device: str | None = None, threads: int = 1) -> tuple[str, ...] | None:
        launcher = Local(workers=workers, threads=threads, device=device)  # type: ignore[arg-type]
        found = _layout(candidate(strategy("data_parallel"), launcher), cluster)
        return None if found is None else found.devices

    assert places(2) == ("h0/cuda0", "h0/cuda1")
    assert places(4) == ("h0/cpu0",) * 4, "of two GPUs there are too few"
    assert places(2, "cpu") == ("h0/cpu0",) * 2
    assert places(2, "cpu", threads=4) is None, "more threads than cores"


# A profile of what was measured


def layers(**like: str) -> list[dict[str, Any]]:
    return [{"name": name, "like": kind} for name, kind in like.items()]


def test_layers_that_are_alike_take_as_long_and_all_take_the_whole() -> None:
    """1 and 3 s of two that are alike, on two ranks; the last takes 2 s, and 2 s of the loss: half as much in all."""
    told = [{"a": 0.5, "b": 3.0, "c": 2.0, "": 1.0}, {"a": 1.5, "b": 3.0, "c": 2.0, "": 3.0}]
    assert scaled(layers(a="L", b="L", c="M"), told, 4.0) == {"a": 1.0, "b": 1.0, "c": 2.0}
    assert scaled(layers(a="L", b="M"), [{}], 4.0) == {"a": 2.0, "b": 2.0}, "nothing is known of them"


def test_a_part_takes_the_mean_of_all_ranks() -> None:
    one, two = ({"share": 0.5, "forward": t, "backward": 2 * t, "kind": "part"} for t in (1.0, 2.0))
    assert mean([one, two]) == {"share": 0.5, "forward": 1.5, "backward": 3.0}
    assert mean([{"share": None}]) is None


def test_a_network_without_known_parts_is_one_layer() -> None:
    facts = {"kind": "facts", "layers": [], "model": "Odd", "parameter_bytes": 12, "batch_size": 10}
    whole = Pass(rows=10, threads=1, together=2, forward=1.0, backward=2.0, update=0.5)
    found = made(None, "here", facts, [Found(loading=n, passes=[whole] if n == 1 else []) for n in (1.0, 2.0, 9.0)])
    (layer,) = found.layers
    assert (found.name, layer.name, layer.parameter_bytes) == ("Odd", "Odd", 12)
    (timing,) = layer.timings
    assert (timing.rows, timing.together, timing.forward, timing.backward) == (10, 2, 1.0, 2.0)
    assert found.loading_seconds == 2.0
    assert made("mine", "here", facts, [Found(loading=1.0, passes=[whole])]).name == "mine"
