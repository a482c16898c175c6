"""The update in shared pages: each rank its slice, the same numbers as one optimizer over everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.comm.world import World
from apportion.core.strategy import State
from apportion.parallel.optim.elementwise import FlatPiece, rule_of
from apportion.parallel.replica.step import OneDeviceStep
from apportion.parallel.shared_weights.layout import SharedLayout, is_dense, regions_of
from apportion.parallel.shared_weights.slice_update import stretches
from apportion.strategies.data_parallel import DataParallel, DataParallelStep

pytestmark = pytest.mark.processes

EXACT = 1e-11
"""Relative to a tensor's largest value, at least 1."""
Optimizers = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "weight_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9, eps=1e-3),
}
"""Those that are known to be element-wise."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rule_makes_the_updates_of_torchs_optimizer_piece_by_piece(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(37, dtype=torch.float64, generator=generator)
    p = nn.Parameter(weights.clone())
    optimizer = OPTIMIZERS[name]([p])
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert rule is not None
    initial = [
        optimizer.state[p][s].clone() if s in optimizer.state[p] else torch.zeros(37, dtype=torch.float64)
        for s in rule.slots
    ]
    versions = [
        FlatPiece(weights.clone(), tuple(initial)),
        FlatPiece(torch.empty(37).double(), tuple(torch.empty(37).double() for _ in initial)),
    ]
    for count in range(1, 6):
        gradient = torch.randn(37, dtype=torch.float64, generator=generator)
        p.grad = gradient.clone()
        optimizer.step()
        old, new = versions[(count - 1) % 2], versions[count % 2]
        before = old.weights.clone()
        for at in (slice(0, 5), slice(5, 6), slice(6, 37)):
            parts = [FlatPiece(v.weights[at], tuple(s[at] for s in v.slots)) for v in (old, new)]
            rule.update(optimizer.param_groups[0], count, gradient[at].clone(), *parts)
        assert torch.equal(old.weights, before), "the live version is only read"
        assert (new.weights - p.detach()).abs().max() <= EXACT
        for slot, value in zip(rule.slots, new.slots, strict=True):
            assert (value - optimizer.state[p][slot]).abs().max() <= EXACT, slot


def test_what_is_not_known_to_be_element_wise_has_no_rule() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    for optimizer in (
        torch.optim.LBFGS([p]),
        torch.optim.Rprop([p]),
        torch.optim.Adam([p], capturable=True),
        torch.optim.SGD([p], lr=torch.tensor(0.1)),
        type("Mine", (torch.optim.SGD,), {})([p], lr=0.1),
    ):
        assert rule_of(optimizer, optimizer.param_groups[0]) is None
    hooked = torch.optim.SGD([p], lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert rule_of(hooked, hooked.param_groups[0]) is None


# Whole steps, on real processes


class Network(nn.Module):
    """With everything that a gradient can come by."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(48, 64)  # factored: 8 rows of 48 + 64 are less than 48 x 64
        self.twice = nn.Linear(64, 64)
        self.also_read = nn.Linear(64, 64, bias=False)
        self.seldom = nn.Linear(64, 64)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.narrow = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.wide(x))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        h = torch.tanh(self.also_read(h)) + linear(h, self.also_read.weight)
        some = x[:, :1] > 1
        if some.any():  # in some shares of some batches
            h = h + some * self.seldom(h)
        return self.narrow(self.frozen(h))


def made(
    rows: int, optimizer: str, batch_size: int, model: Callable[[], nn.Module] = Network, **changes: Any
) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 48, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (rows,), generator=generator)
    return Workload(
        model=model,
        data=lambda: TensorDataset(x, y),
        optimizer=OPTIMIZERS[optimizer],
        batch_size=batch_size,
        steps=7,
        precision="float64",
        **{"loss": cross_entropy, **changes},
    )


def trained(world: World, workload: Workload) -> tuple[State, bool]:
    step = DataParallel().build(workload, world)
    assert isinstance(step, DataParallelStep)
    while (batch := step.take()) is not None:
        step(batch)
    return step.state_dict(), step.gradient_update.shared_memory is not None


def alone(workload: Workload) -> State:
    step = OneDeviceStep(workload, torch.device("cpu"))
    while (batch := step.take()) is not None:
        step(batch)
    return step.state_dict()


def assert_equals_one_device(workload: Workload, workers: int, *, shared: bool = True) -> None:
    expected = dict(alone(workload).tensors())
    answers = on_ranks(trained, workers, workload)
    first = dict(answers[0][0].tensors())
    for state, is_shared in answers:
        assert is_shared == shared
        found = dict(state.tensors())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() <= EXACT * max(1.0, float(tensor.abs().max())), name
            assert torch.equal(found[name], first[name]), f"every rank has the same bits: {name}"


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_over_slices_equals_one_device(name: str, workers: int) -> None:
    assert_equals_one_device(made(29, name, 8), workers)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 8, 64])
def test_factored_and_whole_gradients_are_the_same(batch_size: int) -> None:
    """From a batch of which all layers are factored to one of which none is; and ranks without rows."""
    if batch_size == 1:
        return assert_equals_one_device(made(7, "momentum", 2), 2)
    assert_equals_one_device(made(3 * batch_size + 1, "momentum", batch_size), 2)
    return None


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("workers", [2, 3])
def test_clipping_uses_the_whole_norm(name: str, workers: int) -> None:
    assert_equals_one_device(made(29, name, 8, clip_grad_norm=0.05), workers)


def channels_last() -> nn.Module:
    made = nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5)
    )
    return made.to(memory_format=torch.channels_last)


def test_the_order_of_a_parameters_elements_in_memory_stays() -> None:
    assert_equals_one_device(made(29, "momentum", 8, model=channels_last), 2)


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5))
    net[2].weight = net[0].weight
    return net


class Gap(nn.Module):
    """A gap behind each of two factored layers: the middle of all weights may be in it, and a bias follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 35, bias=False), nn.Linear(35, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x[:, :48])))[:, :5]


@pytest.mark.parametrize("outputs", range(33, 49))
def test_what_lies_behind_a_factored_layer(outputs: int) -> None:
    def network() -> nn.Module:
        made = Gap()
        made.first, made.last = nn.Linear(48, 35, bias=False), nn.Linear(35, outputs)
        return made

    assert_equals_one_device(made(13, "momentum", 4, network), 2)


def test_tied_weights() -> None:
    assert_equals_one_device(made(29, "adam", 8, model=tied), 3)


class Watched(nn.Module):
    """A hook on a weight sees its gradient, and may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(48, 5)
        self.net.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_a_network_with_gradient_hooks_keeps_them() -> None:
    """They see each rank's share of the gradient, as in any other data parallelism: the weights stay where they are."""
    assert_equals_one_device(made(29, "sgd", 8, model=Watched), 2, shared=False)


def test_microbatches_fill_the_same_factors() -> None:
    workload = made(29, "momentum", 8)
    expected = dict(alone(workload).tensors())
    (state, _), _ = on_ranks(trained_in_parts, 2, workload)
    for name, tensor in state.tensors():
        assert (expected[name] - tensor).abs().max() <= EXACT, name


def trained_in_parts(world: World, workload: Workload) -> tuple[State, bool]:
    step = DataParallel(microbatches=3).build(workload, world)
    while (batch := step.take()) is not None:
        step(batch)
    return step.state_dict(), True


# Layout


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_parameters_lie_apart_and_start_on_cache_lines(sizes: list[int], workers: int) -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    optimizer = torch.optim.Adam(parameters)
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert rule is not None
    regions = regions_of([(optimizer.param_groups[0], rule)], parameters)
    layout = SharedLayout(regions=regions, buffers=[], layers=[], rows=1, parameters=len(parameters), workers=workers)
    (region,) = regions
    ends = [start + n for start, n in zip(region.starts, sizes, strict=True)]
    assert all(start % 16 == 0 for start in region.starts)
    assert all(end <= start for end, start in zip(ends, region.starts[1:], strict=False))
    memory = memoryview(bytearray(layout.nbytes))
    names = [f"{part}/{v}/0" for part in ("weights", "exp_avg", "exp_avg_sq") for v in range(2)]
    places = sorted((layout.tensor(memory, n).data_ptr(), layout.tensor(memory, n).nbytes) for n in names)
    assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(places))


@given(st.permutations(range(4)))
def test_dense_in_any_order(order: list[int]) -> None:
    t = torch.zeros(2, 3, 1, 4)
    assert is_dense(t.permute(order))
    assert not is_dense(t[:, :2].permute(order))
    assert not is_dense(torch.zeros(2, 1).expand(2, 3))


def test_rows_that_follow_each_other_are_one_product() -> None:
    table = torch.tensor([[0, 3, 0], [3, 0, 0], [3, 2, 1], [6, 1, 0]])
    assert stretches(table) == [(0, 5), (6, 7)]


def test_weights_slots_and_buffers_are_in_memory_twice_whatever_the_number_of_workers() -> None:
    workload = made(29, "adam", 8, model=channels_last)
    state = alone(workload)
    once = sum(t.nbytes for name, t in state.tensors() if not name.endswith("/step"))
    for workers in (2, 3):
        shared, own = zip(*on_ranks(where, workers, workload), strict=True)
        assert 2 * once <= shared[0] <= 2.5 * once, "two versions, and what lies between tensors"
        assert sum(own) < 0.1 * once, "the buffers of a forward pass"


def where(world: World, workload: Workload) -> tuple[int, int]:
    step = DataParallel().build(workload, world)
    while (batch := step.take()) is not None:
        step(batch)
    step.state_dict()
    return tuple(step.held())
