"""Networks that do not compute in float64, or compute in less than the run's precision in places, and their proofs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import compiled_nets
import networks
import planted
import pytest
import torch
from compiled_nets import Insists, Narrow, Normalised, Sparse, balanced_loss, workload
from planted import Faulty
from ranks import by_value
from torch import Tensor, nn

import apportion
from apportion import Workload
from apportion.parallel.tracing.network import settle, undisturbed
from apportion.runtime.proof.coarse_rounding import coarse_types
from apportion.runtime.proof.proof import Proof

pytestmark = pytest.mark.processes


def sparse(*, balanced: bool) -> Workload:
    return workload(partial(Sparse, balanced=balanced), loss=balanced_loss)  # type: ignore[arg-type]


def check(workload: Workload, strategy: Any) -> Proof:
    with by_value(networks), by_value(planted), by_value(compiled_nets):
        return apportion.check(workload, strategy, workers=2, steps=2)


@pytest.mark.parametrize("strategy", ["layer_placement", "tensor_parallel", "data_parallel", "pipeline_parallel"])
def test_a_network_that_has_no_float64_is_proved_in_its_own_precision(strategy: str) -> None:
    proof = check(sparse(balanced=False), strategy)
    assert [r.precision for r in proof.rounds] == ["float32"]
    assert proof.holds, proof.sentence
    assert "does not compute in float64" in proof.by_design[0]
    assert "checked in float32 alone" in proof.by_design[0]


@pytest.mark.parametrize("strategy", ["layer_placement", "tensor_parallel"])
def test_hooks_that_a_forward_installs_when_it_is_first_called_are_installed_once(strategy: str) -> None:
    assert check(sparse(balanced=True), strategy).holds


@pytest.mark.parametrize("strategy", ["data_parallel", "pipeline_parallel"])
def test_a_balancing_loss_is_not_divided(strategy: str) -> None:
    with pytest.raises(ValueError, match=r"divides the batch: use single_device, or a strategy that gives every"):
        check(sparse(balanced=True), strategy)


def test_a_line_that_insists_on_a_type_without_a_word_is_understood() -> None:
    proof = check(workload(Insists), "data_parallel")
    assert [r.precision for r in proof.rounds] == ["float32"]
    assert proof.holds


def test_a_network_that_has_no_float64_and_trains_in_bfloat16_is_proved_in_float32_first() -> None:
    proof = check(replace(workload(Insists), precision="bfloat16"), "data_parallel")
    assert [r.precision for r in proof.rounds] == ["float32", "bfloat16"]
    assert proof.holds, proof.sentence
    assert "shown in float32" in proof.sentence
    assert "checked in float32 and bfloat16 alone" in proof.by_design[0]
    faulty = check(replace(workload(Insists), precision="bfloat16"), Faulty("mean_of_means"))
    assert faulty.verdict == "different"


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_the_rounding_of_every_operation_in_bfloat16_is_moved_whatever_the_precision(precision: str) -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    short = x.bfloat16(), w.bfloat16()
    plain = torch.mm(*short)
    with coarse_types(precision, moves=True) as types:
        moved, kept = torch.mm(*short), torch.mm(x, w)
    assert (moved != plain).any()
    assert torch.allclose(moved, plain, rtol=0.02)
    assert torch.equal(kept, torch.mm(x, w))
    assert types == ({"bfloat16", "float32"} if precision == "float64" else {"bfloat16"} - {precision})


@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel"])
def test_adam_in_bfloat16_is_held_against_the_rounding_of_its_gradients_signs(strategy: str) -> None:
    proof = check(workload(Normalised, precision="bfloat16", batch_size=16), strategy)
    wide, own = proof.rounds
    assert (wide.precision, own.precision) == ("float64", "bfloat16")
    assert own.verdict != "different", own
    assert proof.holds, proof.sentence


def test_a_mistake_in_a_network_that_has_no_float64_is_caught() -> None:
    proof = check(workload(Insists), Faulty("mean_of_means"))
    assert proof.verdict == "different"


def test_a_run_of_a_network_that_has_no_float64_is_proved_before_it_trains() -> None:
    with by_value(networks), by_value(compiled_nets):
        events = list(apportion.run(workload(Insists), "data_parallel", launcher=apportion.local(2), check=True))
    (start,) = (event for event in events if event.kind == "start")
    assert start.data["proof"]["verdict"] == "equal", start.data["proof"]


@pytest.mark.parametrize("strategy", ["data_parallel", "map_reduce", "fully_sharded"])
def test_a_part_in_bfloat16_is_held_against_its_own_rounding(strategy: str) -> None:
    proof = check(workload(Narrow), strategy)
    assert proof.holds, proof.sentence
    wide, own = proof.rounds
    assert (wide.precision, own.precision) == ("float64", "float32")
    assert wide.coarsest is None
    assert own.verdict != "different"
    if own.verdict == "undecided":
        assert own.coarsest == "bfloat16"
        assert "in float32 with bfloat16 in places rounding alone" in proof.sentence


def test_a_mistake_beside_a_part_in_bfloat16_is_caught() -> None:
    assert check(workload(Narrow), Faulty("mean_of_means")).verdict == "different"


def test_a_look_leaves_no_hooks_and_what_is_installed_once_is_settled_once() -> None:
    model, x = Sparse(balanced=True), torch.zeros(2, compiled_nets.INPUTS)
    with undisturbed(model):
        model(x)
    assert not model.installed
    assert not model.layers[0].gate._forward_hooks
    settle(model, lambda: model(x))
    assert model.installed
    assert len(model.layers[0].gate._forward_hooks) == 1


class Counts(nn.Module):
    """It counts its calls, and installs a hook at each."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.register_forward_hook(lambda *_: None)
        return x


class Begins(nn.Module):
    """Its first batch sets a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(1))
        self.begun = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.begun = True
            self.scale = x.abs().max()[None] + 1.0
            self.register_forward_hook(lambda *_: None)
        return x / self.scale


@pytest.mark.parametrize(("model", "name"), [(Counts, "calls"), (Begins, "begun")])
def test_what_a_forward_does_beside_is_not_settled(model: Callable[[], nn.Module], name: str) -> None:
    made, x = model(), torch.ones(2, 3)
    settle(made, lambda: made(x))
    assert getattr(made, name) == 0
    assert not made._forward_hooks
