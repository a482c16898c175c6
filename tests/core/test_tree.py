"""Nests of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apportion.core import tree

NEST = {"a": torch.arange(4.0), "b": (torch.arange(8).view(4, 2), [3, "text", None])}


def test_every_tensor_is_mapped_and_the_rest_stays() -> None:
    doubled = tree.map_tensors(lambda t: t * 2, NEST)
    assert torch.equal(doubled["a"], torch.arange(4.0) * 2)
    assert torch.equal(doubled["b"][0], torch.arange(8).view(4, 2) * 2)
    assert doubled["b"][1] == [3, "text", None]
    assert isinstance(doubled["b"], tuple)
    assert torch.equal(tree.map_tensors(torch.neg, torch.ones(2)), -torch.ones(2))


def test_tensors_come_in_order() -> None:
    assert [t.dtype for t in tree.tensors(NEST)] == [torch.float32, torch.int64]
    assert tree.tensors(NEST["a"])[0] is NEST["a"]
    assert tree.tensors([1, "two"]) == []


def test_only_floating_tensors_are_cast() -> None:
    cast = tree.cast(NEST, torch.device("cpu"), torch.float64)
    assert cast["a"].dtype == torch.float64
    assert cast["b"][0].dtype == torch.int64
    assert tree.cast(NEST, torch.device("cpu"), None)["a"].dtype == torch.float32


def test_rows_and_length_mean_dimension_0() -> None:
    assert tree.length(NEST) == 4
    part = tree.rows(NEST, slice(1, 3))
    assert part["a"].tolist() == [1, 2]
    assert part["b"][0].tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("nothing", [[], {}, 3, torch.tensor(1.0), [torch.tensor(1.0)]])
def test_what_has_no_rows_is_refused(nothing: Any) -> None:
    with pytest.raises(ValueError, match="dimension 0 as the example"):
        tree.length(nothing)


def call(*given: Any, **named: Any) -> tuple[Any, Any]:
    return given, named


def test_models_are_called_as_their_inputs_are_built() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert tree.call(call, x) == ((x,), {})
    assert tree.call(call, x, "s") == ((x, "s"), {})
    assert tree.call(call, (x, y)) == ((x, y), {})
    assert tree.call(call, [x, y], "s") == ((x, y, "s"), {})
    assert tree.call(call, {"left": x, "right": y}) == ((), {"left": x, "right": y})
    assert tree.call(call, {"left": x}, "s") == ((), {"left": x, "state": "s"})
    assert tree.call(call, 3) == ((3,), {})
