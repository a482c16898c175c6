"""The rows of a data set that few others are like, and the rows of a proof that have them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from apportion.runtime.proof.proof_workload import spread_with
from apportion.runtime.proof.rare_rows import LEAST, rare_rows

MANY = 3000


class Listed(Dataset[Any]):
    """Examples that are made one by one."""

    def __init__(self, make: Callable[[int], Any], many: int = MANY) -> None:
        self._make, self._many, self.read = make, many, 0

    def __len__(self) -> int:
        return self._many

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self._make(index)


LABELS = torch.arange(MANY) % 5
LABELS[[7, 2222]] = 9
IGNORED = LABELS.clone()
IGNORED[1234] = -100
WORDS = torch.randint(1, 50, (MANY, 6), generator=torch.Generator().manual_seed(0))
SOME_IGNORED = WORDS.index_put((torch.tensor(77), torch.tensor(3)), torch.tensor(-100))
WEIGHTS = torch.ones(MANY).index_fill(0, torch.tensor([1500]), 50.0)
X = torch.zeros(MANY, 2)

WHOLE: dict[str, tuple[torch.Tensor, int]] = {
    "a class that is seen twice": (LABELS, 7),
    "an ignored label": (IGNORED, 1234),
    "an ignored word": (SOME_IGNORED, 77),
    "a heavy row": (WEIGHTS, 1500),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_row_that_few_others_are_like_is_among_the_first_of_whole_tensors(name: str) -> None:
    targets, row = WHOLE[name]
    found = rare_rows(TensorDataset(X, targets), 0.0)
    assert row in found.rows[:8]
    assert found.read == found.of == MANY


@pytest.mark.parametrize("name", WHOLE)
def test_and_of_examples_that_are_read_one_by_one(name: str) -> None:
    targets, row = WHOLE[name]
    found = rare_rows(Listed(lambda i: (X[i], targets[i])), 60.0)
    assert {row, *([2222] if row == 7 else [])} & {*found.rows[:8]}
    assert found.read == MANY


def test_the_shortest_and_the_longest_sequence_are_found() -> None:
    lengths = torch.full((MANY,), 8)
    lengths[31], lengths[2900] = 2, 40
    found = rare_rows(Listed(lambda i: (torch.ones(int(lengths[i])), 1)), 60.0)
    assert {31, 2900} <= {*found.rows}


def test_padded_sequences_are_told_apart_by_what_they_have() -> None:
    padded = torch.where(torch.arange(6) < 4, WORDS, 0)
    padded[11], padded[444] = torch.tensor([3, 0, 0, 0, 0, 0]), WORDS[444]
    assert {11, 444} <= {*rare_rows(TensorDataset(padded, LABELS), 0.0).rows}


def test_the_sequence_with_the_most_ignored_words_is_found() -> None:
    words = SOME_IGNORED.clone()
    words[40] = 0  # as few words as the one after it
    words[1600] = -100
    assert {77, 1600} <= {*rare_rows(TensorDataset(X, words), 1).rows[:4]}


def test_a_subset_names_its_own_rows() -> None:
    found = rare_rows(Subset(TensorDataset(X, IGNORED), range(1000, 2000)), 0.0)
    assert found.rows[0] == 234


def test_what_there_was_no_time_to_read_is_counted() -> None:
    data = Listed(lambda i: (X[i], LABELS[i]))
    found = rare_rows(data, 0.0)
    assert found.read == data.read == LEAST
    assert found.of == MANY


def test_labels_that_a_data_set_keeps_are_read_at_once_where_they_are_those_of_its_rows() -> None:
    kept: Any = Listed(lambda i: (X[i], int(IGNORED[i])))
    kept.targets = IGNORED.tolist()
    found = rare_rows(kept, 0.0)
    assert found.rows[0] == 1234
    assert found.read == MANY
    others: Any = Listed(lambda i: (X[i], int(IGNORED[i])))
    others.targets = (LABELS + 1).tolist()
    assert rare_rows(others, 0.0).read < MANY


@pytest.mark.parametrize("wanted", [1, 5, 60, 100])
def test_chosen_rows_have_the_rare_ones_and_are_spread(wanted: int) -> None:
    rows = spread_with((97, 3, 50), 100, wanted)
    assert len(rows) == len({*rows}) == wanted
    assert {*(97, 3, 50)[:wanted]} <= {*rows}
    assert rows == sorted(rows)
    assert wanted < 60 or max(b - a for a, b in itertools.pairwise(rows)) <= 4
