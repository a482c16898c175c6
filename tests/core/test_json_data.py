"""Settings survive JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.json_data import from_plain, to_plain

words = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
nests = st.recursive(
    words,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.integers(), st.integers(0, 9)).map(Counter)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(nests)
def test_whatever_goes_in_comes_back_through_json(value: Any) -> None:
    assert same(from_plain(json.loads(json.dumps(to_plain(value, "value")))), value)


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor(3), np.float64(0.25), np.int64(4)])
def test_a_number_kept_as_a_tensor_is_a_number(number: Any) -> None:
    found = from_plain(json.loads(json.dumps(to_plain(number, "lr"))))
    assert found == number.item()


@pytest.mark.parametrize("value", [object(), torch.zeros(2), {1, 2}, lambda: 0, b"bytes", 1j])
def test_anything_else_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(ValueError, match=r"schedule\['deep'\]\[1\] is a .*numbers, texts, lists and dicts"):
        to_plain({"deep": [1, value]}, "schedule")


def test_infinities_and_no_numbers_survive() -> None:
    told = json.dumps(to_plain([float("inf"), float("-inf"), float("nan")], "value"))
    high, low, none = from_plain(json.loads(told))
    assert (high, low) == (float("inf"), float("-inf"))
    assert none != none
