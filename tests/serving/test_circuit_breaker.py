"""Who is left out of the wait, and how it comes back."""

from __future__ import annotations

import pytest

from apportion.serving.pool.circuit_breaker import Breaker, BreakerConfig

PATIENCE = BreakerConfig(misses=3, rest=1.0, longest=4.0, proven=10.0)


def late(breaker: Breaker, now: float, times: int = 1) -> Breaker:
    for _ in range(times):
        breaker = breaker.late(now)
    return breaker


def test_it_opens_after_so_many_misses_in_a_row() -> None:
    breaker = late(Breaker(patience=PATIENCE), 0.0, 2)
    assert breaker.state(0.0) == "closed"
    assert late(breaker.in_time(0.0), 0.0, 2).state(0.0) == "closed", "an answer in time begins the count again"
    assert late(breaker, 0.0).state(0.0) == "open"


def test_one_request_probes_it_after_its_rest_and_an_answer_in_time_closes_it() -> None:
    breaker = late(Breaker(patience=PATIENCE), 5.0, 3)
    assert not breaker.probe_due(5.9)
    assert breaker.probe_due(6.0)
    probing = breaker.probed()
    assert probing.state(6.0) == "half_open"
    assert not probing.probe_due(6.5), "one at a time"
    assert probing.in_time(6.1).state(6.1) == "closed"


def test_misses_of_requests_from_before_do_not_lengthen_its_rest() -> None:
    breaker = late(Breaker(patience=PATIENCE), 0.0, 3)
    assert late(breaker, 0.5, 10) == breaker


def test_rests_double_while_probes_are_late_up_to_the_longest() -> None:
    breaker, now, rests = late(Breaker(patience=PATIENCE), 0.0, 3), 0.0, []
    for _ in range(4):
        rests.append(breaker.rest)
        now += breaker.rest
        assert breaker.probe_due(now)
        breaker = breaker.probed().late(now)
    assert rests == [1.0, 2.0, 4.0, 4.0]


def test_who_is_late_again_soon_after_it_came_back_rests_longer_and_who_held_out_does_not() -> None:
    back = late(Breaker(patience=PATIENCE), 0.0, 3).probed().in_time(1.0)
    assert late(back, 2.0, 3).rest == 2.0
    assert late(back, 11.0, 3).rest == 1.0


def test_a_probe_that_could_not_be_sent_leaves_it_to_the_next_request() -> None:
    breaker = late(Breaker(patience=PATIENCE), 0.0, 3).probed()
    assert not breaker.probe_due(1.0)
    assert breaker.refused().probe_due(1.0)


def test_a_new_process_is_not_judged_by_the_last_one() -> None:
    assert late(Breaker(patience=PATIENCE), 0.0, 3).fresh(0.5).state(0.5) == "closed"


@pytest.mark.parametrize(("name", "value"), [("misses", 0), ("rest", 0.0), ("longest", -1.0), ("proven", 0.0)])
def test_a_patience_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        BreakerConfig(**{name: value})  # type: ignore[arg-type]


def test_a_longest_rest_that_is_shorter_than_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match=r"longest=4\.0 is shorter than rest=5\.0"):
        BreakerConfig(rest=5.0)
