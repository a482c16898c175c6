"""How rows are weighted by their micro-batch, from gradients of the same rows in two distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from apportion.script_check.comparison.combination import divisors, position_weights
from apportion.script_check.comparison.rearrangement import windows
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.record import Event, RankRecord
from apportion.script_check.references import rearranged_feed
from apportion.script_check.rows import Rows

ROWS = np.random.default_rng(0).normal(size=(12, 40))
"""The gradients of 12 rows."""
MOVED = np.roll(np.arange(12), -2)


def summed(order: Sequence[int], divide_by: Sequence[float]) -> list[Array]:
    """What three micro-batches of four rows add to a gradient."""
    parts = np.asarray(order).reshape(3, 4)
    return [ROWS[part].sum(axis=0) / number for part, number in zip(parts, divide_by, strict=True)]


def test_counts_of_each_micro_batch_are_found_from_the_gradients_alone() -> None:
    tokens = np.arange(3, 15)
    counts, moved = tokens.reshape(3, 4).sum(axis=1), tokens[MOVED].reshape(3, 4).sum(axis=1)
    found = divisors(summed(range(12), counts), summed(list(MOVED), moved))
    assert found is not None
    assert np.allclose(np.asarray(found.first) / found.first[0], counts / counts[0])
    assert np.allclose(np.asarray(found.second) / found.first[0], moved / counts[0])
    assert found.same_total
    assert not found.proportional_to((4, 4, 4))


def test_means_over_rows_are_divided_by_the_numbers_of_rows() -> None:
    found = divisors(summed(range(12), (4, 4, 4)), summed(list(MOVED), (4, 4, 4)))
    assert found is not None
    assert found.proportional_to((4, 4, 4))


def test_gradients_that_are_no_sums_over_rows_have_no_divisors() -> None:
    first = [np.tanh(each) for each in summed(range(12), (4, 4, 4))]
    assert divisors(first, [np.tanh(each) for each in summed(list(MOVED), (4, 4, 4))]) is None


def test_too_few_elements_say_nothing() -> None:
    first, second = summed(range(12), (4, 4, 4)), summed(list(MOVED), (4, 4, 4))
    assert divisors([each[:6] for each in first], [each[:6] for each in second]) is None
    first[0][0] = np.inf
    assert divisors(first, second) is None


def test_weights_of_positions_follow_from_another_order() -> None:
    parts = summed(range(12), (1, 1, 1))
    weights = np.array([3.0, 1.5, 1.0])
    first = [weight * part for weight, part in zip(weights, parts, strict=True)]
    second = [weight * part for weight, part in zip(weights, [*parts[1:], parts[0]], strict=True)]
    assert position_weights(first, second) == pytest.approx((3.0, 1.5, 1.0))
    assert position_weights(parts, [*parts[1:], parts[0]]) is None, "all alike"
    assert position_weights(first, [second[0], second[1] + 1e-3 * parts[1], second[2]]) is None


def accumulated() -> tuple[Feed, RankRecord]:
    """Two steps over two batches of two rows each."""
    batches = [Rows(np.array([[2.0 * at], [2.0 * at + 1.0]]), "float64") for at in range(4)]
    fed = FedIteration(batches=list(batches), indices=[None] * 4)
    events: list[Event] = [{"kind": "iteration", "loader": "a", "number": 0, "length": 4, "full": 4, "step": 0}]
    for at, batch in enumerate(batches):
        events.append({"kind": "batch", "loader": "a", "iteration": 0, "number": at, "indices": None, "rows": batch})
        events.append({"kind": "forward", "gradients": True, "rows": None})
        events[-2:] = [{**event, "step": at // 2} for event in events[-2:]]
        if at % 2:
            events.append({"kind": "step", "step": at // 2 + 1, "optimizer": 0, "weights": {"w": np.ones(1) * at}})
    return Feed(iterations={"a": [fed]}), RankRecord(0, tuple(events))


def test_one_step_has_its_rows_in_other_micro_batches_and_the_next_its_micro_batches_in_another_order() -> None:
    feed, union = accumulated()
    assert [(found.sizes, found.moved) for found in windows(union).values()] == [((2, 2), 1), ((2, 2), 2)]
    made = rearranged_feed(feed, union)
    values = [batch.values.ravel().tolist() for batch in made.iterations["a"][0].batches]
    assert values == [[1, 2], [3, 0], [6, 7], [4, 5]]
    assert [weights["w"].item() for weights in made.weights_after[0]] == [1, 3]
    assert [batch.values[0, 0] for batch in feed.iterations["a"][0].batches] == [0, 2, 4, 6], "the feed stays as it was"


def test_rows_that_cannot_be_told_apart_stay_where_they_are() -> None:
    feed, union = accumulated()
    fed = feed.iterations["a"][0]
    fed.batches[0] = (fed.batches[0], 3.0)
    made = rearranged_feed(feed, union).iterations["a"][0]
    assert made.batches[:2] == fed.batches[:2]
    assert made.batches[2] is fed.batches[3]
