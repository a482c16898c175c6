"""The sum of gradients over ranks that meet over torch.distributed, as on several hosts: it leaves early, and is the
same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import apart, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload, World
from apportion.errors import ApportionError
from apportion.parallel.replica.gradient_buckets import GradientSum
from apportion.strategies.data_parallel import DataParallel

pytestmark = pytest.mark.processes

WIDE = 480
"""A layer of WIDE x WIDE has enough weights in float64 to leave by itself, of 2 or of 3 ranks."""


class Chosen(nn.Module):
    """Of two wide layers each row's first number chooses one: a rank may have no row for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, WIDE)
        self.norm = nn.BatchNorm1d(WIDE)
        self.ways = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(2)])
        self.out = nn.Linear(WIDE, 3)
        self.idle = nn.Parameter(torch.ones(WIDE, WIDE))

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.norm(self.into(x)))
        first = x[:, 0] > 0
        y = torch.zeros_like(h)
        for way, rows in zip(self.ways, (first, ~first), strict=True):
            if rows.any():
                y = y.index_put((rows.nonzero()[:, 0],), way(h[rows]))
        return self.out(torch.tanh(y))


class Twice(nn.Module):
    """Two wide layers, each called twice, and recomputed in the backward pass: by parts of it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, WIDE), nn.Linear(WIDE, 3)
        self.wide = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        h = self.into(x)
        for layer in [*self.wide, *self.wide]:
            h = checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), h, use_reentrant=self.reentrant)
        return self.out(h)


class OneStorage(nn.Module):
    """Two parameters whose gradients autograd puts into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(WIDE, WIDE)), nn.Parameter(torch.ones(WIDE, WIDE))
        self.into, self.out = nn.Linear(8, WIDE), nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Any:
        together = torch.tanh(self.a.view(-1) + self.b.view(-1)).view(WIDE, WIDE) / WIDE
        return self.out(self.into(x) @ together)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chosen": Chosen,
    "twice": lambda: Twice(reentrant=False),
    "reentrant": lambda: Twice(reentrant=True),
    "one storage": OneStorage,
}


def workload(name: str) -> Workload:
    x = torch.randn(34, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Workload(
        model=MODELS[name],
        data=lambda: TensorDataset(x, (x.sum(1) > 0).long()),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=8,
        steps=6,
        precision="float64",
    )


def trained(world: World, name: str, microbatches: int) -> tuple[dict[str, Tensor], list[int]]:
    """The weights; and after each backward pass, how much of its sum was under way."""
    own = apart()
    step: Any = DataParallel(microbatches=microbatches).build(workload(name), own)
    sent = []
    for batch in apportion.batches(step):
        step.backward(batch)
        sent.append(len(step.gradient_update._sums[None]._sent))
        step.update()
    step.close()
    weights = {key: value.clone() for key, value in step.state_dict().model.items()}
    own.close()
    return weights, sent


@pytest.mark.parametrize(("name", "microbatches"), [("chosen", 1), ("twice", 1), ("twice", 2), ("one storage", 1)])
@pytest.mark.thorough
def test_what_leaves_during_the_backward_pass_is_the_same_sum(name: str, microbatches: int) -> None:
    expected, _ = trained(World(), name, microbatches)
    ranks = on_ranks(trained, 3, name, microbatches)
    for weights, sent in ranks:
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-12)
        assert sent[0] == 0, "the first pass is watched"
        assert max(sent) == 2, "both wide layers are under way when a pass ends"
    # Who has no row for a layer holds it back until its pass has ended, and with it those after it.
    assert (min(min(sent[1:]) for _, sent in ranks) < 2) == (name == "chosen")


def test_a_gradient_that_comes_in_parts_does_not_leave_early() -> None:
    expected, _ = trained(World(), "reentrant", 1)
    for weights, sent in on_ranks(trained, 2, "reentrant", 1):
        assert set(sent) == {0}
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-12)


def grows_later(world: World) -> str:
    """In parts from the second step on."""
    own = apart()
    p = nn.Parameter(torch.ones(WIDE, WIDE, dtype=torch.float64))
    sums = GradientSum([p], own.group(), early=True)
    try:
        for parts in (1, 2):
            sums.begin_backward()
            for _ in range(parts):
                p.sum().backward()
            sums(None, 0.0)
    except ApportionError as error:
        return str(error)
    finally:
        own.close()
    return "summed"


def test_a_gradient_that_grows_after_it_has_left_is_an_error() -> None:
    for told in on_ranks(grows_later, 2):
        assert "shape (480, 480) went on growing" in told
        assert "use_reentrant=False" in told


def clip(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-1e6, 1e6)


def lies_where_it_lay(world: World) -> list[tuple[bool, bool]]:
    """Of a large gradient, one with a hook that was added later, and two in one memory: does it lie where autograd has
    put it, and is it the sum?"""
    own = apart()
    alone, hooked, *both = [nn.Parameter(torch.full((WIDE, WIDE), float(n + 1)).double()) for n in range(4)]
    small = nn.Parameter(torch.ones(3, dtype=torch.float64))
    given = [alone, hooked, *both, small]
    sums = GradientSum(given, own.group(), early=True)
    hooked.register_post_accumulate_grad_hook(clip)
    for _ in range(3):  # the first pass is watched
        for p in given:
            p.grad = None
        sums.begin_backward()
        together = torch.tanh(both[0].view(-1) + both[1].view(-1)).sum()
        (alone.square().sum() + hooked.square().sum() + together + small.sum()).backward()
        grads = [p.grad for p in given if p.grad is not None]
        sums(None, 0.0)
    with torch.no_grad():
        slope = 1 - torch.tanh(both[0] + both[1]).square()
        expected = [2 * alone, 2 * hooked, slope, slope, torch.ones(3)]
    found = [
        (p.grad is grad, (p.grad - own.size * one).abs().max().item() < 1e-12)
        for p, grad, one in zip(given, grads, expected, strict=True)
        if p.grad is not None
    ]
    sums.close()
    own.close()
    return found


def test_a_large_gradient_that_is_alone_in_its_memory_is_summed_there() -> None:
    for found in on_ranks(lies_where_it_lay, 2):
        assert [summed for _, summed in found] == [True] * 5
        assert [in_place for in_place, _ in found] == [True, False, False, False, False]


def conjugated(world: World) -> list[bool]:
    """A large complex gradient that autograd gives as the conjugate of what lies in its memory."""
    own = apart()
    found = []
    for early in (True, False):
        p = nn.Parameter(torch.ones(300, 300, dtype=torch.complex128))
        sums = GradientSum([p], own.group(), early=early)
        factor = torch.complex(torch.ones(300, 300).double(), torch.full((300, 300), world.rank + 1.0).double())
        for _ in range(2):
            p.grad = None
            sums.begin_backward()
            (p.conj() * factor).real.sum().backward()
            sums(None, 0.0)
        assert p.grad is not None
        found.append(bool((p.grad == sum(complex(1.0, rank + 1.0) for rank in range(own.size))).all()))
        sums.close()
    own.close()
    return found


def test_a_complex_gradient_is_summed_as_it_is() -> None:
    assert on_ranks(conjugated, 2) == [[True, True]] * 2


def replaced_by_a_hook(world: World) -> bool:
    """A hook puts another tensor in the place of a gradient whose sum has begun: it is the sum all the same."""
    own = apart()
    p = nn.Parameter(torch.ones(WIDE, WIDE, dtype=torch.float64))
    sums = GradientSum([p], own.group(), early=True)
    for _ in range(2):
        p.grad = None
        sums.begin_backward()
        p.sum().backward()
        if sums._sent:
            p.grad = torch.zeros_like(p)
        sums(None, 0.0)
    assert p.grad is not None
    summed = bool((p.grad == own.size).all())
    sums.close()
    own.close()
    return summed


def test_a_gradient_that_was_put_in_the_place_of_one_that_has_left_is_replaced_by_the_sum() -> None:
    assert on_ranks(replaced_by_a_hook, 2) == [True, True]


def summed_in_place(world: World) -> bool:
    torch.manual_seed(0)
    model, group = OneStorage().double(), world.group()
    sums = GradientSum(list(model.parameters()), group)
    x = torch.randn(4, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sums(None, 0.0)
    summed = [p.grad for p in model.parameters() if p.grad is not None]
    return all(torch.equal(s, g * world.size) for s, g in zip(summed, own, strict=True))


def test_gradients_in_one_storage_are_each_summed_once() -> None:
    assert on_ranks(summed_in_place, 2) == [True, True]


def sum_of_a_replaced_rank(world: World) -> float:
    """Rank 1 takes part from the second group on, and has built its sum for that; the other one goes on with its own.
    Both rejoin."""
    own = apart()
    later = own.renew()
    p = nn.Parameter(torch.ones(WIDE, WIDE, dtype=torch.float64))
    sums = GradientSum([p], (own, later)[own.rank].group(), early=True)
    sums.rejoin(later.group())
    p.sum().backward()
    sums(None, 0.0)
    assert p.grad is not None
    found = float(p.grad.sum() / p.numel())
    for made in (sums, later, own):
        made.close()
    return found


def test_a_rank_that_was_replaced_finds_the_others_where_the_sum_has_connections_of_its_own() -> None:
    assert on_ranks(sum_of_a_replaced_rank, 2) == [2.0, 2.0]
