"""The rows of what collate returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from apportion.core.data.batch import misfit_of, row_count, rows_of


@dataclass
class Record:
    x: torch.Tensor
    names: list[str]


NESTED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
COUNTED: list[tuple[Any, Any, int, int]] = [
    (torch.ones(5, 2), torch.ones(5), 5, 5),
    (torch.ones(4, 2), torch.ones(4), 5, 4),  # one was left out
    (torch.ones(9, 2), torch.ones(9), 5, 9),  # packed
    (torch.ones(9, 2), torch.ones(5), 5, 5),  # a graph, with a label each
    (torch.ones(9, 2), {"boxes": [torch.ones(2, 4), torch.ones(1, 4)], "names": ["a", "b"]}, 2, 2),
    (torch.ones(7, 3, 2), torch.ones(7, 3), 3, 3),  # time first
    (torch.ones(3, 2), None, 4, 3),  # no targets
    (None, None, 4, 4),
    (torch.ones(0, 2), torch.ones(0), 5, 0),
    (torch.ones(1, 2), [{"boxes": torch.ones(3, 4)}], 1, 1),
    (torch.ones(2, 2), [torch.ones(3, 4), torch.ones(3, 4)], 2, 2),
    (torch.ones(1, 2), [torch.ones(1), torch.ones(1)], 2, 1),  # columns, of which a row was left out
]


@pytest.mark.parametrize(("inputs", "targets", "examples", "rows"), COUNTED)
def test_rows_are_counted_as_collate_returned_them(inputs: Any, targets: Any, examples: int, rows: int) -> None:
    assert row_count(inputs, targets, examples) == rows


def test_targets_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"targets\['b'\] has 4 rows in place of 7 of 5 examples.*count="):
        row_count(torch.ones(5), {"a": torch.ones(7), "b": torch.ones(4)}, 5)


MISFITS: list[tuple[Any, str]] = [
    ({"x": torch.ones(4), "values": torch.ones(9)}, r"inputs\['values'\] has 9 rows in place of 4"),
    ((torch.ones(4), torch.tensor(1.0)), r"inputs\[1\] is a tensor without rows"),
    ({"x": NESTED}, r"inputs\['x'\] is a nested tensor"),
    (torch.eye(4).to_sparse(), "inputs is a tensor of layout sparse_coo"),
    ((torch.ones(4), pack_sequence([torch.ones(3)])), r"inputs\[1\] is a PackedSequence"),
    (Record(torch.ones(3), []), r"inputs\.x has 3 rows in place of 4"),
    ([torch.ones(2), torch.ones(3)], r"inputs\[0\] has 2 rows in place of 4"),
]


@pytest.mark.parametrize(("value", "said"), MISFITS)
def test_a_leaf_without_a_row_an_example_is_named(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rows_of(value, slice(0, 2), 4)


def test_columns_lists_of_entries_and_records_are_cut() -> None:
    boxes = [torch.full((i + 1, 4), float(i)) for i in range(4)]
    value = {"x": torch.arange(4), "boxes": boxes, "names": ["a", "b", "c", "d"], "size": (2, 3), "kind": "image"}
    assert misfit_of(value, 4, "targets") is None
    part = rows_of(value, slice(1, 3), 4)
    assert part["x"].tolist() == [1, 2]
    assert [len(each) for each in part["boxes"]] == [2, 3]
    assert (part["names"], part["size"], part["kind"]) == (["b", "c"], (2, 3), "image")
    assert [t.tolist() for t in rows_of([torch.arange(2), torch.arange(2)], slice(0, 1), 2)] == [[0], [0]]
    assert rows_of(Record(torch.arange(3), ["a", "b", "c"]), slice(1, 3)).names == ["b", "c"]
