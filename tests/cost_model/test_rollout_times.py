"""The seconds of rollouts of any size, from a few that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from by_hand import chain

from apportion.cost_model.profile import Profile
from apportion.cost_model.rollouts import LearnTiming, PlayTiming, RolloutTimes, between


def play(environments: int, environment: float, together: int = 1, **more: float) -> PlayTiming:
    """The network acts in half the time of the environments."""
    acting = environment / 2
    return PlayTiming(
        device="made", together=together, environments=environments, environment=environment, acting=acting, **more
    )


def learn(environments: int, steps: int, forward: float, together: int = 1, update: float = 0.0) -> LearnTiming:
    return LearnTiming(
        device="made",
        together=together,
        environments=environments,
        steps=steps,
        forward=forward,
        backward=2 * forward,
        update=update,
    )


TIMES = RolloutTimes(
    environments=4,
    steps=8,
    played=(play(1, 1.0), play(4, 2.0), play(16, 8.0)),
    learned=(learn(1, 2, 1.0), learn(16, 2, 4.0), learn(1, 8, 2.0), learn(16, 8, 32.0)),
)


def test_a_value_between_two_places_is_on_a_line_in_logarithms() -> None:
    assert between([(1, 1.0), (16, 4.0)], 4) == pytest.approx(2.0)
    assert between([(16, 4.0), (1, 1.0), (64, 4.0)], 32) == pytest.approx(4.0), "by the nearest two"


@pytest.mark.parametrize(
    ("points", "at", "expected"),
    [
        ([(2, 3.0), (4, 6.0)], 8, 12.0),
        ([(2, 3.0), (4, 3.0)], 8, 3.0),
        ([(2, 3.0), (4, 1.0)], 8, 1.0),
        ([(2, 3.0), (4, 24.0)], 8, 48.0),
        ([(2, 3.0), (4, 6.0)], 1, 1.5),
        ([(2, 3.0), (4, 24.0)], 1, 1.5),
    ],
    ids=["in proportion", "level", "never falls", "never faster than the place", "below", "below, never faster"],
)
def test_outside_of_what_was_measured_it_grows_no_faster_than_the_place(
    points: list[tuple[float, float]], at: float, expected: float
) -> None:
    assert between(points, at) == pytest.approx(expected)


def test_a_single_place_grows_with_the_place_and_nothing_has_no_logarithm() -> None:
    assert between([(4, 2.0)], 8) == pytest.approx(4.0)
    assert between([(1, 0.0), (3, 1.0)], 2) == pytest.approx(0.5)
    assert between([(1, 0.0), (3, 1.0)], 9) == pytest.approx(1.0)


@pytest.mark.parametrize(("environments", "a_step"), [(1, 1.0), (2, 2**0.5), (4, 2.0), (8, 4.0), (16, 8.0)])
def test_a_rollout_is_played_in_as_many_steps_as_it_has(environments: int, a_step: float) -> None:
    playing = TIMES.playing("made", 1, environments, 5)
    assert playing == pytest.approx((5 * a_step, 2.5 * a_step, 0.0))


def test_what_a_step_and_a_rollout_take_beside_counts_as_well() -> None:
    times = replace(TIMES, played=(play(4, 2.0, beside=0.25, a_rollout=3.0),))
    assert times.playing("made", 1, 4, 8).beside == pytest.approx(8 * 0.25 + 3.0)


@pytest.mark.parametrize(
    ("size", "forward"),
    [((1, 2), 1.0), ((16, 8), 32.0), ((4, 2), 2.0), ((4, 8), 8.0), ((1, 4), 2**0.5), ((4, 4), 4.0)],
)
def test_what_is_learnt_lies_between_the_nearest_numbers_of_environments_and_of_steps(
    size: tuple[int, int], forward: float
) -> None:
    assert TIMES.learning("made", 1, *size) == pytest.approx((forward, 2 * forward))


def test_each_place_has_times_of_its_own() -> None:
    both = replace(
        TIMES,
        played=(*TIMES.played, play(4, 6.0, together=2)),
        learned=(*TIMES.learned, learn(4, 8, 7.0, together=2, update=0.5), learn(4, 2, 3.0, together=2, update=0.1)),
    )
    assert both.places == [("made", 1), ("made", 2)]
    assert both.playing("made", 2, 4, 1).environment == 6.0
    assert both.learning("made", 2, 4, 8).forward == 7.0
    assert both.updating("made", 2) == (pytest.approx(0.3), None)
    assert both.sizes("made", 1) == [(k, t) for k in (1, 4, 16) for t in (2, 8)]
    assert both.sizes("made", 2) == [(4, 2), (4, 8)]


def test_a_place_where_nothing_was_learnt_is_none() -> None:
    assert replace(TIMES, learned=()).places == []


def test_they_are_a_part_of_the_file_of_a_profile() -> None:
    known = replace(chain(1.0), frames=32, rollouts=replace(TIMES, left_out="64 environments: they do not open"))
    assert Profile.from_json(known.to_json()) == known
