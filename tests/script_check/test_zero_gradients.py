"""Weights that only rounding moves are not compared; all others are, those without any gradient among them."""

from __future__ import annotations

from typing import Any

import numpy as np

from apportion.script_check.comparison.first_difference import first_difference
from apportion.script_check.record import RankRecord

BEGINNING = {"model.a": np.ones(3), "model.b": np.ones(2)}


def record(rank: int, gradients: dict[str, Any], weights: dict[str, Any]) -> RankRecord:
    step = {"kind": "step", "step": 1, "optimizer": 0, "number": 1, "site": "", "rates": [0.1], "buffers": {}}
    network = {"kind": "network", "step": 0, "weights": BEGINNING}
    return RankRecord(rank, (network, {**step, "gradients": gradients, "weights": weights}))


def parted(first: list[float], other: list[float], moved: list[float]) -> list[str]:
    """The names of the tensors that differ where ``b`` has these gradients on a rank and in one process, and moves so
    on the rank."""
    large = np.array([1.0, -2.0, 0.5])
    weights = {**BEGINNING, "model.a": 1 - large}
    rank = record(0, {"model.a": large, "model.b": np.array(first)}, {**weights, "model.b": 1 - np.array(moved)})
    union = record(0, {"model.a": large, "model.b": np.array(other)}, weights)
    found, _ = first_difference([rank], union)
    return [] if found is None else found.names


def test_what_rounding_moves_is_not_compared() -> None:
    assert parted([1e-18, 0.0], [-3e-17, 2e-18], moved=[1e-4, -1e-4]) == []


def test_what_rounding_moves_in_a_slice_is_not_compared() -> None:
    whole = {"model.a": np.array([1.0, 2.0])}
    ranks = []
    for rank, (gradient, weight) in enumerate([(1.0, 0.9), (1e-18, 1.9)]):
        begun = {"kind": "network", "step": 0, "weights": {"model.a": whole["model.a"][rank : rank + 1]}}
        event = record(rank, {"model.a": np.array([gradient])}, {"model.a": np.array([weight])}).events[1]
        ranks.append(RankRecord(rank, (begun, event)))
    one = record(0, {"model.a": np.array([1.0, -1e-18])}, {"model.a": np.array([0.9, 2.1])}).events[1]
    union = RankRecord(0, ({"kind": "network", "step": 0, "weights": whole}, one))
    found, _ = first_difference(ranks, union)
    assert found is None


def test_what_moves_without_any_gradient_is() -> None:
    assert parted([0.0, 1e-18], [0.0, 1e-18], moved=[1e-4, 0.0]) == ["model.b"]


def test_what_has_a_gradient_is() -> None:
    assert parted([1e-5, 1e-18], [1e-5, 1e-18], moved=[1e-4, 0.0]) == ["model.b"]
