"""Tensors that hold numbers of all ranks are known, as results of collectives or as computed from such."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from apportion.script_check.recording.figures import Reductions


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> Reductions:
    """The watch over collectives, which are those of one rank without a group: they leave tensors as they are."""
    for name in ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "gather"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: None)
    return Reductions()


def divided(reductions: Reductions, sums: Tensor, counts: Tensor) -> Tensor:
    found = sums / counts
    reductions.follow((sums, counts), found)
    return found


@torch.no_grad()
def test_what_is_computed_from_the_result_of_a_collective_holds_numbers_of_all_ranks(reductions: Reductions) -> None:
    right, rows, own = torch.tensor(3.0), torch.tensor(8.0), torch.tensor(4.0)
    dist.all_reduce(right)
    assert reductions.marked(right)
    accuracy = divided(reductions, right, rows)
    assert reductions.marked(accuracy)
    assert reductions.marked(divided(reductions, accuracy, rows)), "at any number of steps from it"
    assert not reductions.marked(rows)
    assert not reductions.marked(divided(reductions, own, rows))
    stacked = torch.stack([own, right])
    reductions.follow(([own, right],), stacked)
    assert reductions.marked(stacked), "one of a list is enough"


def test_what_is_computed_with_gradients_is_no_number_of_an_evaluation(reductions: Reductions) -> None:
    loss = torch.tensor(3.0)
    dist.all_reduce(loss)
    assert not reductions.marked(divided(reductions, loss, torch.tensor(2.0)))
