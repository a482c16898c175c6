"""What one process is given of the rows and random numbers of several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_events import Rank

from apportion.script_check.comparison.reading import reading
from apportion.script_check.feed import FedIteration, Feed
from apportion.script_check.recording import loaders
from apportion.script_check.rows import Rows, Unjoinable, joined, split

ONE, TWO = np.array([1.0, 2.0]), np.array([3.0, 4.0])


def test_a_draw_for_the_rows_of_all_ranks_has_theirs_one_rank_after_the_other() -> None:
    feed = Feed(iterations={"train.py:5": [FedIteration()]}, draws={"train.py:7 randn": [[ONE], [TWO]]})
    drawn = feed.draw("train.py:7 randn", 0, (4,))
    assert drawn is not None
    assert drawn.tolist() == [1, 2, 3, 4]
    assert feed.draw("train.py:7 randn", 0, (2,)) is None, "no single rank's numbers are those of all rows"
    assert feed.draw("train.py:7 randn", 1, (4,)) is None
    assert feed.draw("train.py:8 randn", 0, (4,)) is None


def test_micro_batches_of_all_ranks_follow_one_another_where_there_is_no_loader() -> None:
    feed = Feed(draws={"train.py:7 randint": [[ONE, ONE + 10], [TWO, TWO + 10]]})
    drawn = [feed.draw("train.py:7 randint", number, (2,)) for number in range(5)]
    assert [None if each is None else each.tolist() for each in drawn] == [[1, 2], [3, 4], [11, 12], [13, 14], None]


def test_one_process_with_the_micro_batches_of_one_rank_has_the_rows_of_all() -> None:
    feed = Feed(draws={"train.py:7 randint": [[ONE], [TWO]]}, join_draws=True)
    drawn = feed.draw("train.py:7 randint", 0, (2,))
    assert drawn is not None
    assert drawn.tolist() == [1, 2, 3, 4]


def test_draws_that_are_the_same_on_all_ranks_stay_as_they_are() -> None:
    feed = Feed(draws={"train.py:7 randperm with gradients": [[ONE], [ONE]]})
    drawn = feed.draw("train.py:7 randperm with gradients", 0, (2,))
    assert drawn is not None
    assert drawn.tolist() == [1, 2]
    assert feed.draw("train.py:7 randperm with gradients", 0, (4,)) is None


def test_rows_of_a_batch_join_to_the_batch() -> None:
    batch = {"x": Rows(np.arange(6.0).reshape(3, 2), "float64"), "name": ["a", "b", "c"]}
    parts = split(batch)
    assert [part["name"] for part in parts] == [["a"], ["b"], ["c"]]
    again = joined(parts)
    assert again["name"] == batch["name"]
    assert np.array_equal(again["x"].values, batch["x"].values)
    with pytest.raises(Unjoinable):
        split({"x": Rows(np.zeros(3), "float64"), "temperature": 0.5})


def test_batches_that_are_skipped_are_not_trained_on() -> None:
    rank = Rank(0)
    place = rank.iteration()
    for rows in ([0, 1], [2, 3], [4, 5]):
        rank.read(place, rows)
    rank.train()
    rank.read(place, [6, 7])
    rank.train()
    assert [batch.rows for batch in reading(rank.record)[0].trained] == [(4, 5), (6, 7)]


def test_batches_of_a_window_are_all_trained_on() -> None:
    rank = Rank(0)
    place = rank.iteration()
    for rows in ([0, 1], [2, 3]):
        rank.read(place, rows)
    rank.emit("forward", gradients=True, site="")
    rank.train()
    assert [batch.rows for batch in reading(rank.record)[0].trained] == [(0, 1), (2, 3)]


def test_a_batch_that_a_loader_has_read_ahead_is_trained_on_when_the_script_has_it() -> None:
    rank = Rank(0)
    loader, number = place = rank.iteration()
    rank.read(place, [0, 1])
    for position, rows in enumerate(([2, 3], [4, 5])):
        rank.read(place, rows)
        rank.emit("taken", loader=loader, iteration=number, number=position)
        rank.train()
    found = reading(rank.record)[0]
    assert [(batch.rows, batch.step) for batch in found.trained] == [((0, 1), 1), ((2, 3), 2)]


def test_an_evaluation_between_two_batches_of_training() -> None:
    rank = Rank(0)
    place = rank.iteration()
    rank.read(place, [0, 1])
    rank.train()
    rank.evaluate([[0], [1], [2]])
    rank.read(place, [2, 3])
    rank.train()
    training, evaluation = reading(rank.record)
    assert (training.evaluation, evaluation.evaluation) == (False, True)
    assert len(training.trained) == 2
    assert evaluation.trained == []


def test_large_batches_are_recorded_as_they_were_read_until_they_fill_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaders, "LARGEST_BATCH", 8)
    batch = torch.arange(4.0)  # of 16 bytes, and 32 in float64
    recorder: Any = SimpleNamespace(plan={"memory": 2 * loaders.SHARE * 40, "ranks": 2}, large_rows=0)

    def contents(mapped: bool = True) -> Any:
        return loaders._contents(recorder, batch, batch.double(), mapped)

    with torch.no_grad():
        assert contents() is None, "the rows of an evaluation are known by their indices"
    found = [contents() for _ in range(3)]
    assert [each is not None for each in found] == [True, True, False]
    assert found[0].dtype == "float32"
    assert contents(mapped=False).dtype == "float64", "what has no indices is always recorded"
