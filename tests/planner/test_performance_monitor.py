"""A run's steps beside what they should take: what is told, once, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from apportion.core.event import Event
from apportion.cost_model.cost import Cost
from apportion.planner.performance_monitor import WINDOW, Expected, PerformanceMonitor, cores_wanted, drift, expected_of

EXPECTED = Expected(
    step_seconds=0.010,
    terms={"loading": 0.0005, "computing": 0.007, "updating": 0.0005, "waiting": 0.002},
    measured=True,
)


def rank(**more: float) -> Mapping[str, float]:
    """As expected, and so many seconds more."""
    return {name: seconds + more.get(name, 0.0) for name, seconds in EXPECTED.terms.items()}


def test_within_20_percent_nothing_is_told() -> None:
    assert drift(EXPECTED, {0: rank(), 1: rank(computing=0.0019)}) is None
    assert drift(EXPECTED, {0: rank(computing=-0.0015)}) is None


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (
            {0: rank(computing=0.005), 1: rank(computing=0.005)},
            "computing takes 1.71 times as long, 12 ms instead of 7 ms: something else runs",
        ),
        ({0: rank(waiting=0.005), 1: rank(computing=0.005)}, "rank 1 is slow, its own work takes 1.62 times"),
        ({0: rank(waiting=0.004), 1: rank(waiting=0.004)}, "communicating takes 3.00 times as long"),
        ({0: rank(loading=0.004)}, "loading data takes 9.00 times as long"),
        ({0: rank(updating=0.003)}, "updating the weights takes 7.00 times as long"),
        (
            {0: rank(computing=-0.004)},
            "computing takes 0.43 times as long, 3 ms instead of 7 ms: something else ran on these cores when it was",
        ),
        (
            {0: rank(waiting=-0.0019, loading=-0.0004)},
            "communicating takes 0.05 times as long, 0.1 ms instead of 2 ms: something else used the link",
        ),
    ],
)
def test_the_reason_is_the_part_that_has_grown(ranks: Mapping[int, Mapping[str, float]], told: str) -> None:
    found = drift(EXPECTED, ranks)
    assert found is not None
    assert told in found.cause
    assert "the measured 10 ms" in found.cause


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (0.4, "7 ms: something else runs on these cores; something waits for a core 40% of the time"),
        (
            0.01,
            "these cores run at a lower clock, or share memory with another machine's; something waits for a core 1%",
        ),
        (None, "something else runs on these cores, or they run at a lower clock"),
    ],
)
def test_whether_anything_waits_for_a_core_says_why_computing_takes_longer(wanted: float | None, told: str) -> None:
    found = drift(EXPECTED, {0: rank(computing=0.005)}, wanted=wanted)
    assert found is not None
    assert told in found.cause


def test_what_was_only_predicted_was_predicted_wrongly() -> None:
    found = drift(replace(EXPECTED, measured=False), {0: rank(computing=-0.004)})
    assert found is not None
    assert found.cause.endswith("3 ms instead of 7 ms: the prediction was too high")


def test_who_waits_for_a_core_is_read_as_linux_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "cpu"
    assert cores_wanted(path) is None
    path.write_text("some avg10=12.50 avg60=0.53 avg300=1.66 total=1\nfull avg10=99.00 avg60=0.00 total=0\n")
    assert cores_wanted(path) == 0.125
    path.write_text("another format\n")
    assert cores_wanted(path) is None


def test_what_was_expected_to_take_nothing_is_told_in_milliseconds() -> None:
    expected = Expected(step_seconds=0.008, terms={"computing": 0.008}, measured=False)
    found = drift(expected, {0: {"loading": 0.003, "computing": 0.008, "updating": 0.0, "waiting": 0.0}})
    assert found is not None
    assert "loading data takes 3 ms a step more" in found.cause
    assert "the predicted 8 ms" in found.cause


def test_a_step_takes_as_long_as_its_slowest_rank_sees_it() -> None:
    found = drift(EXPECTED, {0: rank(), 1: rank(computing=0.005)})
    assert found is not None
    assert found.step_seconds == pytest.approx(0.015)


def test_it_is_told_again_only_where_it_has_changed_by_20_percent_or_is_over() -> None:
    assert drift(EXPECTED, {0: rank(computing=0.005)}, last=1.5) is None
    assert drift(EXPECTED, {0: rank(computing=0.007)}, last=1.5) is None
    assert drift(EXPECTED, {0: rank(computing=0.009)}, last=1.5) is not None
    assert drift(EXPECTED, {0: rank(computing=0.0015)}, last=1.5) is None, "not over yet"
    over = drift(EXPECTED, {0: rank(computing=0.0005)}, last=1.5)
    assert over is not None
    assert (over.ratio, "again as the measured 10 ms" in over.cause) == (1.0, True)


def test_a_price_is_what_a_run_can_see_of_it() -> None:
    terms = {"computing": 1.0, "updating": 0.2, "communicating": 0.3, "bubble": 0.1, "waiting": 0.1, "loading": 0.1}
    found = expected_of(Cost(terms=terms, examples=1))
    assert found.terms == {"loading": 0.1, "computing": 1.0, "updating": 0.2, "waiting": pytest.approx(0.5)}
    assert sum(found.terms.values()) == pytest.approx(found.step_seconds)


def speed(number: int, data: Mapping[str, float]) -> Event:
    return Event(kind="speed", step=7, epoch=0.5, seconds=3.0, data={"rank": number, **data})


def told(watch: PerformanceMonitor, *, times: int, **more: float) -> list[Event]:
    found = [watch.take(speed(number, rank(**more))) for _ in range(times) for number in (0, 1)]
    return [event for event in found if event is not None]


def test_a_change_is_told_once_and_a_spike_not_at_all() -> None:
    watch = PerformanceMonitor(EXPECTED, wanted=lambda: None)
    assert told(watch, times=1, computing=9.0) == [], "a first step takes longer"
    assert told(watch, times=WINDOW) == []
    assert told(watch, times=1, computing=0.5) == []
    assert told(watch, times=WINDOW) == []
    (event,) = told(watch, times=3 * WINDOW, computing=0.006)
    assert (event.kind, event.step) == ("drift", 7)
    assert event.data["ratio"] == pytest.approx(1.6)
    assert event.data["expected_seconds"] == 0.010
    (event,) = told(watch, times=3 * WINDOW)
    assert "again" in event.data["cause"]


def fault(action: str) -> Event:
    return Event(kind="fault", step=9, epoch=0.5, seconds=4.0, data={"rank": 1, "cause": "", "action": action})


def test_after_a_fault_it_begins_anew_and_with_fewer_workers_nothing_is_compared() -> None:
    watch = PerformanceMonitor(EXPECTED, wanted=lambda: None)
    told(watch, times=WINDOW)
    watch.take(fault("replaced in 0.30 s"))
    assert told(watch, times=WINDOW, computing=0.006) == []
    assert len(told(watch, times=WINDOW, computing=0.006)) == 1
    watch.take(fault("goes on with 1 worker"))
    assert told(watch, times=3 * WINDOW, computing=0.02) == []
