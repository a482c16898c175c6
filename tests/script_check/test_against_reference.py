"""The gradients of ranks against those of a function, with and without clipping."""

from __future__ import annotations

import numpy as np
import pytest
from rank_events import Rank

from apportion.script_check.comparison.clipped import against_function
from apportion.script_check.comparison.tensors import Array
from apportion.script_check.record import RankRecord

OWN = np.array([3.0, 4.0])
LIMIT = 1.0


def record(gradient: Array, clip: dict[str, object] | None = None, kind: str = "SGD") -> RankRecord:
    rank = Rank(0)
    if clip is not None:
        rank.emit("clip", limit=LIMIT, names=["net.weight"], site="train.py:8", **clip)
    rank.train(gradients={"net.weight": gradient}, weights={"net.weight": np.ones(2)}, type=kind)
    return rank.record


def stated(gradient: Array) -> RankRecord:
    return RankRecord(0, ({"kind": "reference", "step": 0, "gradients": {"net.weight": gradient}},))


def names(own: RankRecord, gradient: Array, union: RankRecord | None = None) -> list[str]:
    return [each.sentence for each in against_function([own], union or own, stated(gradient), "reference.py:loss_of")]


def test_a_gradient_that_is_that_of_the_function_is_no_finding_and_a_multiple_has_its_factor() -> None:
    assert not names(record(OWN), OWN)
    found = against_function([record(2 * OWN)], record(2 * OWN), stated(OWN), "reference.py:loss_of")[0]
    assert (found.name, found.step, found.factor) == ("reference_differs", 1, pytest.approx(2.0))
    assert "every gradient is 2 times that of reference.py:loss_of" in found.sentence


def test_clipping_by_a_known_norm_is_undone_so_that_a_factor_is_found_that_clipping_removes() -> None:
    clip = {"function": "clip_grad_norm_", "norm": 10.0}
    own = record(2 * OWN * LIMIT / (10.0 + 1e-6), clip)
    assert not names(own, 2 * OWN)
    assert "2 times" in names(own, OWN)[0]


def test_clipping_by_a_norm_that_is_not_known_is_made_with_the_function_too() -> None:
    clip = {"function": "clip_grad_norm_", "norm": None}
    own = record(OWN * LIMIT / (5.0 + 1e-6), clip)
    assert not names(own, OWN)
    assert not names(own, OWN, record(OWN)), "one process, which is not sharded, may not clip"
    assert names(record(OWN, clip), OWN)


def test_clipping_by_values_is_made_with_the_function_too() -> None:
    clip = {"function": "clip_grad_value_", "norm": None}
    assert not names(record(np.array([1.0, 0.5]), clip), np.array([7.0, 0.5]))
    assert names(record(np.array([1.0, 0.4]), clip), np.array([7.0, 0.5]))


def test_an_optimizer_that_makes_its_gradients_within_the_step_is_left_out() -> None:
    assert not names(record(2 * OWN, kind="LBFGS"), OWN)
