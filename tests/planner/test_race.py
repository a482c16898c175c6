"""Who leaves a race, who leads it, and what the time of one that left early is worth."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.planner.trials.launched_trials import beside, leader, paced, still_running

FOUR = 4


def rounds(*seconds: float, first: int = 0) -> dict[int, float]:
    return dict(enumerate(seconds, first))


def test_who_lost_every_one_of_four_rounds_by_more_than_makes_a_difference_leaves() -> None:
    given_ = {"a": rounds(1.0, 1.1, 0.9, 1.0), "b": rounds(1.2, 1.3, 1.1, 1.2), "c": rounds(1.02, 1.12, 0.92, 1.02)}
    assert still_running(given_, ["a", "b", "c"]) == ["a", "c"], "c lost each, but by so little that it may be taken"
    assert still_running(given_, ["c", "b"]) == ["c"], "the order of those that were given"


def test_who_lost_only_most_of_four_rounds_stays() -> None:
    given_ = {"a": rounds(1.0, 1.0, 1.0, 1.3), "b": rounds(1.2, 1.2, 1.2, 1.2)}
    assert still_running(given_, ["a", "b"]) == ["a", "b"]


def test_one_alone_goes_on() -> None:
    assert still_running({"a": rounds(1.0)}, ["a"]) == ["a"]


def test_only_rounds_that_both_made_are_compared() -> None:
    assert beside(rounds(1.0, 2.0, 3.0), rounds(5.0, 6.0, first=1)) == ([2.0, 3.0], [5.0, 6.0])
    assert beside(rounds(1.0), rounds(5.0, first=1)) == ([], [])


def test_the_leader_is_the_fastest_of_those_that_ran_longest() -> None:
    """The one that left was measured while the machine was fast."""
    assert leader({"left": rounds(0.5, 0.5), "a": rounds(0.4, 0.4, 1.0), "b": rounds(0.45, 0.45, 0.9)}) == "a"
    assert leader({"left": rounds(0.1), "a": rounds(0.4, 0.4, 1.0), "b": rounds(0.3, 0.3, 0.9)}) == "b"


def test_who_left_while_the_machine_was_fast_is_not_the_faster_for_it() -> None:
    given_ = {"first": rounds(*[0.5] * FOUR, *[1.0] * 10), "left": rounds(*[0.6] * FOUR)}
    found = paced(given_, {})
    assert found["first"] == [*[0.5] * FOUR, *[1.0] * 10]
    assert found["left"] == pytest.approx([1.2] * FOUR)


def test_who_ran_as_long_as_the_leader_keeps_its_seconds() -> None:
    given_ = {"a": rounds(0.5, 0.7, 0.6), "b": rounds(0.8, 0.9, 0.7)}
    assert paced(given_, {}) == {name: pytest.approx(list(own.values())) for name, own in given_.items()}


def test_those_of_a_later_race_are_judged_by_one_that_ran_before() -> None:
    """The machine has become half as fast: whoever takes as long as the other one beside it is as fast."""
    known = {"a": 0.5, "gone": 0.45}
    found = paced({"a": rounds(*[1.0] * FOUR), "new": rounds(*[1.0] * FOUR)}, known)
    assert found == {"a": pytest.approx([0.5] * FOUR), "new": pytest.approx([0.5] * FOUR)}
    found = paced({"a": rounds(*[1.0] * FOUR), "new": rounds(*[0.8] * FOUR, *[0.4] * 9)}, known)
    assert median(found["new"][:FOUR]) == pytest.approx(0.8), "twice as long as in its own usual rounds"
    assert median(found["new"]) == pytest.approx(0.4), "four fifths of the other's"
    assert found["a"] == pytest.approx([0.5] * FOUR)


def test_the_fastest_of_those_that_ran_before_tells_the_pace() -> None:
    known = {"a": 0.5, "b": 0.6}
    found = paced({"a": rounds(*[1.0] * FOUR), "b": rounds(*[1.3] * FOUR)}, known)
    assert found == {"a": pytest.approx([0.5] * FOUR), "b": pytest.approx([0.65] * FOUR)}


@given(
    st.lists(st.floats(0.1, 10.0), min_size=FOUR, max_size=20), st.one_of(st.floats(0.2, 0.94), st.floats(1.06, 5.0))
)
def test_a_machine_that_changes_its_pace_changes_no_order(paces: list[float], factor: float) -> None:
    """Two candidates, of which the second always takes ``factor`` times as long, and leaves after four rounds."""
    first = rounds(*paces)
    second = rounds(*(factor * pace for pace in paces[:FOUR]))
    found = paced({0: first, 1: second}, {})
    if len(paces) > FOUR:
        assert median(found[1]) == pytest.approx(factor * median(first.values()))
        assert found[0] == pytest.approx(paces)
    assert still_running({0: rounds(*paces[:FOUR]), 1: second}, [0, 1]) == [1 if factor < 1 else 0]
