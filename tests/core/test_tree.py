"""Nests of tensors."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

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


def test_length_means_dimension_0() -> None:
    assert tree.length(NEST) == 4


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


@dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    owners: torch.Tensor
    graphs: int


def test_other_mappings_are_entered_and_stay_what_they_are() -> None:
    given = UserDict(tokens=torch.ones(2), inner=MappingProxyType({"weights": torch.ones(3)}), name="a")
    cast = tree.cast(given, torch.device("cpu"), torch.float64)
    assert type(cast) is UserDict
    assert cast["tokens"].dtype == cast["inner"]["weights"].dtype == torch.float64
    assert type(cast["inner"]) is MappingProxyType
    assert given["tokens"].dtype == torch.float32
    assert [len(t) for t in tree.tensors(given)] == [2, 3]
    assert tree.call(call, given)[1].keys() == given.keys()


def test_a_packed_sequence_is_cast_with_its_sizes_as_they_are_and_passed_whole() -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    cast = tree.cast(packed, torch.device("cpu"), torch.float64)
    assert cast.data.dtype == torch.float64
    assert cast.batch_sizes.tolist() == [2, 1, 1]
    assert cast.sorted_indices.tolist() == [1, 0]
    assert tree.call(call, packed, "s") == ((packed, "s"), {})


@pytest.mark.parametrize("made", [Graph, lambda a, b, c: SimpleNamespace(nodes=a, owners=b, graphs=c)])
def test_the_tensors_of_an_object_are_cast_in_a_copy(made: Any) -> None:
    graph = made(torch.ones(4, 2), torch.tensor([0, 0, 1, 1]), 2)
    cast = tree.cast(graph, torch.device("cpu"), torch.float64)
    assert type(cast) is type(graph)
    assert (cast.nodes.dtype, cast.owners.dtype, cast.graphs) == (torch.float64, torch.int64, 2)
    assert graph.nodes.dtype == torch.float32
    assert tree.cast(graph, torch.device("cpu"), None) is graph
