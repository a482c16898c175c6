"""What a degraded answer costs."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.serving import offline_evaluation
from apportion.serving.offline_evaluation import accuracy, statement

TARGETS = np.array([0, 1, 1, 0])
SCORES = {
    "right": np.array([[9, 0], [0, 9], [0, 9], [9, 0]], dtype=np.float32),
    "half": np.array([[1, 0], [1, 0], [0, 1], [0, 1]], dtype=np.float32),
    "wrong": np.array([[0, 2], [2, 0], [2, 0], [0, 2]], dtype=np.float32),
}


def test_every_subset_is_held_against_the_targets() -> None:
    found = statement(SCORES, TARGETS, "mean")
    assert found.examples == 4
    assert found.whole == 1.0
    assert found.alone == {"right": 1.0, "half": 0.5, "wrong": 0.0}
    assert found.without == {"right": 0.0, "half": 1.0, "wrong": 1.0}
    one, two = found.sizes
    assert (one.members, one.subsets, one.least, one.mean, one.most) == (1, 3, 0.0, 0.5, 1.0)
    assert (two.members, two.subsets, two.least, two.mean, two.most) == (2, 3, 0.0, pytest.approx(2 / 3), 1.0)


def test_a_vote_and_weights_count_as_they_are_served() -> None:
    assert statement(SCORES, TARGETS, "vote").whole == 0.5
    weights = {"right": 1.0, "half": 1.0, "wrong": 20.0}
    assert statement(SCORES, TARGETS, "weighted_mean", weights).whole == 0.0


def test_one_member_has_nothing_to_be_without() -> None:
    found = statement({"right": SCORES["right"]}, TARGETS, "mean")
    assert (found.whole, found.without, found.sizes) == (1.0, {}, ())


def test_of_very_many_subsets_some_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_evaluation, "MOST_SUBSETS", 2)
    assert [size.subsets for size in statement(SCORES, TARGETS, "mean").sizes] == [2, 2]


def test_it_is_said_in_percent() -> None:
    lines = statement(SCORES, TARGETS, "mean").lines()
    assert lines[1].split() == ["all", "members", "100.00%"]
    assert "without right              0.00%  -100.00 points" in lines
    assert "any 2 of 3                66.67%  from 0.00% to 100.00%" in lines


def test_outputs_that_are_no_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="are not scores of"):
        accuracy(np.zeros((4, 3, 2)), TARGETS)
