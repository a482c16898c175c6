"""Which parts of recorded batches have a value for each row, and whether a row has the same values in two batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rank_events import Rank

from apportion.script_check.comparison import beyond_gradients
from apportion.script_check.comparison.reading import columns, same_values
from apportion.script_check.rows import Rows, Unjoinable, count, joined, reversed_rows, split


def array(*values: Any) -> Rows:
    return Rows(np.array(values, dtype=np.float64), "float64")


def boxes(rows: Sequence[int], epoch: int) -> Any:
    """Images, and for each of them as many boxes as it has."""
    return (array(*rows), tuple({"boxes": array(*[[row, number] for number in range(row + 1)])} for row in rows))


def padded(rows: Sequence[int], epoch: int) -> Any:
    longest = max(rows) + 2
    return {"x": array(*[[row] * (row + 2) + [0] * (longest - row - 2) for row in rows])}


def graphs(rows: Sequence[int], epoch: int) -> Any:
    """The nodes of all graphs in one tensor, whose first dimension is that of the graphs in some batches."""
    return {"nodes": array(*[row for row in rows for _ in range(1 + (row + epoch) % 2)]), "y": array(*rows)}


def augmented(rows: Sequence[int], epoch: int) -> Any:
    return [array(*[[row, epoch] for row in rows]), array(*rows)]


def cropped(rows: Sequence[int], epoch: int) -> Any:
    return array(*rows), [{"boxes": array([row, epoch])} for row in rows]


@pytest.mark.parametrize(
    ("collate", "random"), [(boxes, False), (padded, False), (graphs, False), (augmented, True), (cropped, True)]
)
def test_rows_that_loader_processes_draw_alike(collate: Any, random: bool) -> None:
    ranks = Rank(0), Rank(1)
    for rank in ranks:
        for epoch, batches in enumerate(([[0, 2, 4], [6, 8, 10]], [[10, 0, 6], [2, 8, 4]])):
            place = rank.iteration(worker_seed=7)
            for rows in batches:
                rank.read(place, [row + rank.rank for row in rows])
                rank.events[-1]["rows"] = collate([row + rank.rank for row in rows], epoch)
                rank.train()
            rank.emit("exhausted", loader=place[0], iteration=place[1])
    found = beyond_gradients.findings([rank.record for rank in ranks], None, same_weights=True)
    assert [finding.name for finding in found if finding.name == "same_draws"] == ["same_draws"] * random


def test_parts_with_a_value_for_each_row() -> None:
    assert list(columns((array(1, 2), array([1], [2]), array(3)), 2)) == [".0", ".1"]
    assert list(columns({"x": [array(1), array(2, 3)], "y": array(0)}, 2)) == [".x"]
    assert list(columns([{"x": array(1, 2)}, {"x": array(2, 3)}], 2)) == [], "two rows, or two parts of two rows"


def test_lists_with_an_entry_for_each_row_are_joined_one_after_another() -> None:
    def targets(*boxes: int) -> tuple[Any, ...]:
        return tuple({"boxes": array(*range(each)), "label": array(each)} for each in boxes)

    first, second = (array(1, 2), targets(2, 2)), (array(3, 4), targets(1, 2))
    whole = joined([first, second], [2, 2])
    assert whole[0].values.tolist() == [1, 2, 3, 4]
    assert [len(each["boxes"].values) for each in whole[1]] == [2, 2, 1, 2]
    assert [each[0]["label"].values.item() for each in split(second[1], 2)] == [1, 2]
    assert (count(second[1], 2), reversed_rows(second[1], 2)[0]) == (2, second[1][1])
    two = [(array(1, 2), array([1], [2])), (array(3, 4), array([3], [4]))]
    assert joined(two, [2, 2])[0].values.tolist() == [1, 2, 3, 4], "two parts, and not two rows"


def test_parts_without_a_value_for_each_row_are_joined_loosely_alone() -> None:
    nodes, views = {"x": array(1, 2, 3), "y": array(1, 2)}, {"x": array(1, 2, 3, 4)}
    assert len(joined([nodes, nodes], [2, 2])["x"].values) == 6
    assert len(joined([views, views], [2, 2], loosely=False)["x"].values) == 8
    with pytest.raises(Unjoinable, match="does not have a value for each row"):
        joined([nodes, nodes], [2, 2], loosely=False)
    boxes = {"x": array(1, 2), "boxes": array([0, 0.3], [0, 0.4], [1, 0.5])}
    with pytest.raises(Unjoinable, match="the places of its rows"):
        joined([boxes, boxes], [2, 2])


def test_values_that_are_padded_at_either_end_are_the_same() -> None:
    assert same_values(np.array([1, 2, 0]), np.array([1, 2]))
    assert same_values(np.array([[0, 0, 1], [0, 1, 2]]), np.array([[0, 1], [1, 2]]))
    assert not same_values(np.array([1, 2]), np.array([2, 2, 1]))
    assert same_values(np.array([np.nan]), np.array([np.nan]))
    assert not same_values([np.array(1)], [np.array(1), np.array(2)])
