"""How many requests are computed at once."""

from __future__ import annotations

import pytest

from apportion.serving.batching import Pace, batch_size

LATER = 100.0


def test_what_waits_is_taken_together_where_that_is_faster_a_row() -> None:
    pace = Pace({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.050})
    assert batch_size([(1, LATER)], 0.0, pace, 32) == 1
    assert batch_size([(1, LATER)] * 4, 0.0, pace, 32) == 4
    assert batch_size([(1, LATER)] * 8, 0.0, pace, 32) == 4, "eight are slower a row than four"


def test_rows_that_gain_nothing_together_are_not_kept_waiting_for_each_other() -> None:
    assert batch_size([(1, LATER)] * 8, 0.0, Pace({1: 0.010, 8: 0.080}), 32) == 1


def test_nobody_is_made_late_by_the_others_of_its_batch() -> None:
    pace = Pace({1: 0.010, 8: 0.017})
    assert batch_size([(1, 0.0115)] + [(1, LATER)] * 7, 0.0, pace, 32) == 2
    assert batch_size([(1, LATER)] * 3 + [(1, 0.011)], 0.0, pace, 32) == 3
    assert batch_size([(1, 0.005)] + [(1, LATER)] * 3, 0.0, pace, 32) == 1, "late already: as fast as it goes"


def test_no_batch_is_larger_than_it_may_be_but_a_request_is_not_cut() -> None:
    pace = Pace({1: 0.010, 32: 0.020})
    assert batch_size([(3, LATER)] * 9, 0.0, pace, 8) == 2
    assert batch_size([(30, LATER), (1, LATER)], 0.0, pace, 8) == 1


def test_what_is_not_known_is_taken_together() -> None:
    assert batch_size([(1, LATER)] * 5, 0.0, Pace(), 32) == 5


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    pace = Pace({1: 0.001, 2: 0.0015})
    for _ in range(30):
        pace.took(2, 0.6)
    assert batch_size([(1, 0.05)] * 2, 0.0, pace, 32) == 1
    pace.took(1, 0.001)
    assert batch_size([(1, 0.05)] * 2, 0.0, pace, 32) == 2 or pace.expected(2) <= 0.0025


def test_sizes_that_clients_choose_are_kept_by_powers_of_two() -> None:
    pace = Pace({1: 0.001})
    for rows in range(0, 20_000, 7):
        pace.took(rows, rows / 1000)
    assert len(pace.seconds) < 50


def test_times_between_sizes_are_on_a_line_and_follow_what_happens() -> None:
    pace = Pace({2: 0.010, 4: 0.020})
    assert [pace.expected(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([0.010, 0.010, 0.015, 0.020, 0.040])
    for _ in range(50):
        pace.took(4, 0.200)
    assert pace.expected(4) == pytest.approx(0.200, rel=1e-3)
