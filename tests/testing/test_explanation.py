"""The cause of a difference, from ratios and cosines: each class of mistake as arrays, and as what they differ by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from apportion.script_check.comparison.tensors import TensorDifference, difference, scale_of
from apportion.testing.verdict import Circumstances, Explanation, explained

Arrays = Mapping[str, np.ndarray[Any, Any]]
RANDOM = np.random.default_rng(5)
SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4)}
OF_RANK = [{name: RANDOM.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(3)]


def mean(ranks: Sequence[Arrays], shares: Sequence[float] | None = None) -> dict[str, Any]:
    weights = shares or [1 / len(ranks)] * len(ranks)
    return {name: sum(w * arrays[name] for w, arrays in zip(weights, ranks, strict=True)) for name in SHAPES}


def cause(found: Sequence[Arrays], reference: Arrays, **seen: Any) -> Explanation:
    differences = [
        differs
        for name in SHAPES
        for rank, arrays in enumerate(found)
        if (differs := difference(name, rank, arrays[name], reference[name], scale_of(reference))) is not None
    ]
    return explained(differences, Circumstances("gradients", len(found), len(SHAPES), **seen))


def times(factor: float, arrays: Arrays) -> dict[str, Any]:
    return {name: factor * array for name, array in arrays.items()}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("factor", "name"),
    [("1/n", "divided"), ("n", "not divided"), (0.0, "no gradient"), (1 + 1e-6, "scale"), (7, "scale")],
)  # fmt: skip
def test_one_factor_in_all_tensors_is_a_scale(ranks: int, factor: Any, name: str) -> None:
    number = {"1/n": 1 / ranks, "n": ranks}.get(factor, factor)
    reference = mean(OF_RANK[:ranks])
    assert cause([times(number, reference)] * ranks, reference).name == name


@pytest.mark.parametrize("shares", [None, (0.25, 0.75)])
def test_gradients_of_each_rank_alone_are_not_averaged(shares: tuple[float, ...] | None) -> None:
    reference = mean(OF_RANK[:2], shares)
    found = cause(OF_RANK[:2], reference, shares=shares or ())
    assert found.name == "not averaged"
    assert found.sentence.startswith("Every gradient differs between the ranks")
    some = [{**reference, "b.weight": arrays["b.weight"]} for arrays in OF_RANK[:2]]
    found = cause(some, reference, shares=shares or ())
    assert found.name == "tensors not averaged"
    assert "The gradient of b.weight differs" in found.sentence


def test_partial_sums_add_up_to_the_reference() -> None:
    reference = times(3, mean(OF_RANK))
    found = [{**reference, "a.bias": arrays["a.bias"]} for arrays in OF_RANK]
    assert cause(found, reference).name == "partial sums"


def test_factors_of_a_rank_each_are_scaled_by_rank() -> None:
    reference = mean(OF_RANK)
    found = cause([times(factor, reference) for factor in (1.0, 0.2, 0.2)], reference)
    assert found.name == "scaled by rank"
    assert "a.weight: 1, 0.2, 0.2" in found.sentence


def test_what_all_ranks_have_alike_is_mixed() -> None:
    reference = mean(OF_RANK[:2], (0.25, 0.75))
    alike = [mean(OF_RANK[:2])] * 2
    assert cause(alike, reference).name == "weights of ranks or statistics"
    assert cause(alike, reference, shares=(0.25, 0.75)).name == "weights of ranks"
    assert cause(alike, reference, statistics=("norm (BatchNorm1d)",)).name == "batch statistics"
    some = [{**reference, "a.bias": alike[0]["a.bias"]}] * 2
    assert cause(some, reference).name == "tensors mixed"


def test_another_shape_is_named() -> None:
    part = TensorDifference("a.weight", 1, float("inf"), float("nan"), float("nan"))
    found = explained([part], Circumstances("gradients", 2, 3))
    assert found.name == "shapes"
    assert found.sentence.startswith("a.weight has another shape")


def test_what_fits_no_class_is_not_given_one() -> None:
    reference = mean(OF_RANK)
    others = [{name: RANDOM.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(3)]
    assert cause(others, reference).name == "differs by rank"
