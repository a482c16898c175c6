"""The first submodule in which ranks compute something else than one device: by planted faults, without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apportion.runtime.proof.module_taps import Relation, Taps, first_difference, related, taps

ROWS = (3, 2, 1)
X = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class RankReader(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.1 * self.rank)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(max=0.01))
        return x.tanh()


def network(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Identity(), nn.Linear(4, 3)).double()
    layers[2] = middle
    return layers


def recorded(net: nn.Module, x: Tensor, weight: float = 1.0) -> Taps:
    with taps(net) as found:
        (F.mse_loss(net(x), torch.ones(len(x), 3, dtype=x.dtype)) * weight).backward()
    return found


def compared(make: Callable[[int], nn.Module], *, total: bool = False) -> Any:
    """One device against three ranks with uneven rows."""
    whole = recorded(network(make(0)), X)
    shares = [len(X) / 6 if total else n / 6 for n in ROWS]
    parts = [
        recorded(network(make(rank)), x, share)
        for rank, (x, share) in enumerate(zip(X.split(ROWS), shares, strict=True))
    ]
    return first_difference(whole, parts)


def test_ranks_with_their_rows_compute_what_one_device_does() -> None:
    assert compared(lambda rank: nn.ReLU()) is None


@pytest.mark.parametrize("make", [RankReader, lambda rank: Centred()])
def test_a_layer_that_computes_something_else_is_named(make: Callable[[int], nn.Module]) -> None:
    found = compared(make)
    assert (found.module, found.what, found.relation) == ("2", "output", Relation("differs"))
    assert "output of 2 is the first" in str(found)


def test_a_hook_that_is_not_linear_is_found_by_the_gradient_of_what_is_before_it() -> None:
    torch.manual_seed(0)
    found = compared(lambda rank: Clamped(), total=True)
    assert found.what == "gradient of the output"
    whole = recorded(network(Clamped()), X)
    parts = [recorded(network(Clamped()), x, n / 6 * 4) for x, n in zip(X.split(ROWS), ROWS, strict=True)]
    for part in parts:  # all that comes after the hook's layer is right
        for tap in part.calls:
            if tap.module in ("", "2", "3"):
                tap.gradients = [g / 4 if g is not None else None for g in tap.gradients]
    found = first_difference(whole, parts)
    assert (found.module, found.what) == ("1", "gradient of the output")


def test_a_loss_that_is_a_sum_is_a_factor() -> None:
    whole = recorded(network(nn.ReLU()), X)
    parts = [recorded(network(nn.ReLU()), x, 0.5 * 2) for x in X.split(3)]
    found = first_difference(whole, parts)
    assert found is not None
    assert found.relation.kind == "concatenated"
    assert found.relation.factor == pytest.approx(0.5)
    assert "2 times as large" in str(found)


def test_micro_batches_and_rows_that_do_not_count() -> None:
    whole = recorded(network(nn.ReLU()), X)
    net = network(nn.ReLU())
    with taps(net) as part:
        for x in X[:4].split(2):
            (F.mse_loss(net(x), torch.ones(2, 3).double()) / 3).backward()
    other, idle = recorded(network(nn.ReLU()), X[4:], 1 / 3), recorded(network(nn.ReLU()), X[:1], 0.0)
    assert first_difference(whole, [part, other, idle], rows=(4, 2, 0)) is None
    assert first_difference(whole, [part, other, idle]) is not None


WHOLE = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) + 1


@pytest.mark.parametrize(
    ("parts", "relation"),
    [
        ([WHOLE, WHOLE], Relation("equal on each rank")),
        ([WHOLE], Relation("equal on each rank")),
        ([WHOLE[:1], WHOLE[1:]], Relation("concatenated", 0)),
        ([WHOLE[:, :5], WHOLE[:, 5:]], Relation("concatenated", 1)),
        ([WHOLE - 2, torch.full_like(WHOLE, 2)], Relation("sum over ranks")),
        ([WHOLE[:1] * 4, WHOLE[1:] * 4], Relation("concatenated", 0, 0.25)),
        ([WHOLE * 2, WHOLE * 2], Relation("equal on each rank", None, 0.5)),
        ([WHOLE, WHOLE * 3], Relation("sum over ranks", None, 0.25)),
        ([WHOLE[:1], WHOLE[1:] * 2], Relation("differs")),
        ([WHOLE[1:], WHOLE[:1]], Relation("differs")),
        ([WHOLE[:2], WHOLE[:1]], Relation("differs")),
    ],
)
def test_how_the_tensors_of_ranks_make_one(parts: list[Tensor], relation: Relation) -> None:
    assert related(WHOLE, parts) == relation


class Odd(nn.Module):
    """One layer called twice, one under two names, one never; an inner one gives a dict, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(5, 5)
        self.alias = self.twice
        self.never = nn.Linear(5, 5)
        self.named = Named()
        self.inplace = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inplace(self.named(self.alias(self.twice(x)))["out"])  # type: ignore[no-any-return]


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": x * 2, "count": 3, "all": [x.sum()]}


def test_calls_are_recorded_in_the_order_in_which_they_end() -> None:
    net = Odd().double()
    found = recorded_sum(net)
    assert [(tap.module, tap.call) for tap in found.calls] == [
        ("twice", 0), ("twice", 1), ("named", 0), ("inplace", 0), ("", 0),
    ]  # fmt: skip
    assert [len(tap.outputs) for tap in found.calls] == [1, 1, 2, 1, 1]
    before, after = found.calls_of("named")[0], found.calls_of("inplace")[0]
    assert torch.equal(before.outputs[0].relu(), after.outputs[0]), "a copy from before the change in place"
    assert before.gradients[1] is None
    assert set(found.parameters) == {"twice.weight", "twice.bias"}
    assert torch.equal(found.parameters["twice.weight"], net.twice.weight.grad)  # type: ignore[arg-type]
    assert first_difference(found, [recorded_sum(net)]) is None


def recorded_sum(net: nn.Module) -> Taps:
    net.zero_grad()
    with taps(net) as found:
        net(X).sum().backward()
    return found


def test_taps_leave_nothing_behind_and_change_no_bit() -> None:
    plain, tapped = Odd().double(), Odd().double()
    tapped.load_state_dict(plain.state_dict())
    plain(X).sum().backward()
    recorded_sum(tapped)
    assert torch.equal(plain.twice.weight.grad, tapped.twice.weight.grad)  # type: ignore[arg-type]
    assert not any(module._forward_hooks for module in tapped.modules())
    assert not any(p._backward_hooks for p in tapped.parameters())


@pytest.mark.thorough
def test_what_is_compiled_is_left_out() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3)).double()
    net[1].compile(backend="eager")
    with taps(net) as found:
        assert not net[1]._forward_hooks
        assert not net[1][0]._forward_hooks
    assert not found.calls
