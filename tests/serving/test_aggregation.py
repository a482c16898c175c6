"""What members say together."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.serving.ensemble.aggregation import check_aggregation, check_outputs, combined

A, B, C = (np.array([row], dtype=np.float32) for row in ([1, 2, 9], [3, 8, 1], [5, 5.5, 2]))


def test_the_mean_is_of_those_who_have_answered() -> None:
    assert combined("mean", [A, B, C]).tolist() == [[3.0, np.float32(15.5 / 3), 4.0]]
    assert combined("mean", [A, C]).tolist() == [[3.0, 3.75, 5.5]]
    assert combined("mean", [A]).tolist() == A.tolist()
    assert combined("mean", [A, B]).dtype == np.float32


def test_the_mean_of_float16_does_not_overflow_on_the_way() -> None:
    large = np.full(3, 60000, dtype=np.float16)
    assert combined("mean", [large, large]).tolist() == [60000.0] * 3


def test_weights_are_those_of_the_members_that_have_answered_and_count_relative_to_each_other() -> None:
    assert combined("weighted_mean", [A, B], [3.0, 1.0]).tolist() == [[1.5, 3.5, 7.0]]
    assert combined("weighted_mean", [A, B], [6.0, 2.0]).tolist() == [[1.5, 3.5, 7.0]]


def test_a_vote_gives_each_class_its_share_of_the_members() -> None:
    assert combined("vote", [A, B, C]).tolist() == [[0.0, np.float32(2 / 3), np.float32(1 / 3)]]
    assert combined("vote", [A]).tolist() == [[0.0, 0.0, 1.0]]


def test_a_vote_on_labels_is_what_most_say_and_the_smallest_of_as_many() -> None:
    labels = [np.array(x) for x in ([4, 1, 2], [4, 0, 1], [3, 0, 0])]
    assert combined("vote", labels).tolist() == [4, 0, 0]
    texts = [np.array([x], dtype=object) for x in (b"dog", b"cat", b"dog")]
    assert combined("vote", texts).tolist() == [b"dog"]


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValueError, match="have no mean, such as labels: use aggregation='vote'"):
        check_outputs("mean", ["f", "i"])
    check_outputs("vote", ["f", "i"])
    with pytest.raises(ValueError, match="'median' must be one of mean, weighted_mean, vote"):
        check_aggregation("median", None, 2)
    with pytest.raises(ValueError, match="weighted_mean needs them"):
        check_aggregation("weighted_mean", None, 2)
    with pytest.raises(ValueError, match="must be 2 positive numbers"):
        check_aggregation("weighted_mean", [1.0, 0.0], 2)
