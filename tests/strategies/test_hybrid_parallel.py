"""hybrid_parallel against one device, on real processes: both ways to exchange the activations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import adam
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Workload, accuracy
from apportion.comm.group import Group
from apportion.comm.world import World
from apportion.core.sampler import DataShard
from apportion.core.strategy import State
from apportion.parallel.tensor.hybrid_model import rotation
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.proof import Proof
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.single_device import SingleDevice

pytestmark = pytest.mark.processes

WAYS = ["all", "rotate"]


def prove(workload: Workload, workers: int, steps: int = 8, **options: Any) -> Proof:
    with by_value(networks), by_value(sys.modules[__name__]):
        strategy = HybridParallel(**{"min_width": 1, **options})
        return apportion.check(workload, strategy, workers=workers, steps=steps)


def assert_exact(proof: Proof) -> None:
    assert_equal(proof, by_design=True)


class Named(nn.Module):
    """As torchvision writes AlexNet and VGG."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, late_norm: bool = False) -> None:
        super().__init__()
        between = [nn.BatchNorm2d(4)] if norm else []
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3), *between, nn.ReLU(inplace=True), nn.MaxPool2d(2))
        after = [nn.BatchNorm1d(7)] if late_norm else []
        self.classifier = nn.Sequential(
            nn.Linear(16, 7),
            *after,
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(7, 5),
            nn.Tanh(),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.classifier(torch.flatten(h, 1))


class InPlace(Named):
    """The back begins with something in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x).flatten(1)
        first, _, *rest = self.classifier
        h = first(h.mul_(2.0))
        for layer in rest:
            h = layer(h)
        return h


def images(batch_size: int, last: int = 1) -> Callable[[], TensorDataset]:
    return networks.tabular(batch_size, 2, 6, 6, last=last)


def workload(model: Callable[[], nn.Module] = Named, batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(model, images(batch_size), batch_size, **options)


@pytest.mark.parametrize(("workers", "optimizer"), networks.sizes())
@pytest.mark.parametrize("exchange", WAYS)
def test_equals_one_device(exchange: str, optimizer: Any, workers: int) -> None:
    named = {"data": "features", "tensor": "classifier"} if optimizer is adam else {}
    proof = prove(workload(optimizer=optimizer, clip_grad_norm=0.7), workers, exchange=exchange, **named)
    assert_exact(proof)


class Several(nn.Module):
    """Two tensors cross, one of them the inputs' own, and the outputs are a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.side, self.up, self.down = (
            nn.Conv2d(2, 3, 3),
            nn.Linear(2, 4),
            nn.Linear(48, 6),
            nn.Linear(10, 3),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, means = torch.relu(self.conv(x)), x.mean((2, 3))
        joined = torch.cat([torch.tanh(self.up(h.flatten(1))), self.side(means)], 1)
        return {"sum": self.down(joined) + means[:, :1], "left": joined[:, :3]}


def several_losses(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["sum"], targets) + outputs["left"].square().mean()


SHAPES: dict[str, Callable[[], Workload]] = {
    "in_place": lambda: workload(InPlace),
    "several": lambda: workload(Several, loss=several_losses),
    "weights": lambda: workload(
        loss=nn.CrossEntropyLoss(weight=torch.tensor(networks.WEIGHTS, dtype=torch.float64)),
        count=lambda targets: torch.tensor(networks.WEIGHTS, dtype=torch.float64)[targets].sum().item(),
    ),
    "counted": lambda: workload(
        loss=lambda o, t: F.cross_entropy(o, t, ignore_index=0), count=lambda targets: float((targets != 0).sum())
    ),
    "more_ranks_than_rows": lambda: workload(batch_size=3),
    "cnn": lambda: networks.cases["cnn"](61),
    "channels_last": lambda: networks.cases["batch_norm_channels_last"](10),
}


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_workload_equals_one_device(name: str, exchange: str) -> None:
    assert_exact(prove(SHAPES[name](), 3, exchange=exchange))


def test_a_norm_after_the_exchange_sees_the_whole_batch() -> None:
    late = lambda: Named(late_norm=True)  # noqa: E731
    made = networks.workload(late, images(7, last=2), 7)
    assert_exact(prove(made, 3))
    with pytest.raises(ValueError, match=r'exchange="rotate" would give classifier.1 the statistics of a part'):
        prove(made, 3, exchange="rotate")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(4, 9), st.sampled_from(WAYS))
def test_any_number_of_rows(workers: int, batch_size: int, exchange: str) -> None:
    assert_exact(prove(workload(batch_size=batch_size), workers, steps=4, exchange=exchange))


def test_dropout_is_named() -> None:
    proof = prove(workload(lambda: Named(dropout=0.5)), 2)
    assert_exact(proof)
    assert "dropout(p=0.5)" in " ".join(proof.by_design)


# What each rank holds, and gives


def holding(world: World, made: Workload, strategy: HybridParallel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in strategy.build(made, world).model.named_parameters()}


def test_each_rank_holds_the_convolutions_and_a_slice_of_the_rest() -> None:
    with by_value(networks):
        first, second = on_ranks(holding, 2, workload(), HybridParallel())
    assert first["features.0.weight"] == second["features.0.weight"] == (4, 2, 3, 3)
    assert [held["classifier.0.weight"] for held in (first, second)] == [(4, 16), (3, 16)]
    assert [held["classifier.3.weight"] for held in (first, second)] == [(5, 4), (5, 3)]


def loaded_rows(world: World, made: Workload) -> int:
    """Of the features, at the first step."""
    step, rows = HybridParallel().build(made, world), 0

    def count(_: nn.Module, given: Any) -> None:
        nonlocal rows
        rows += len(given[0])

    step.model.features.register_forward_pre_hook(count)  # type: ignore[union-attr, operator]
    step.model.features[0].register_forward_pre_hook(count)  # type: ignore[index]
    step(step.source.at(0, step.data_shard))
    step.predict(step.source.at(0, step.data_shard))
    return rows


def test_each_rank_computes_its_share_of_the_convolutions() -> None:
    with by_value(networks):
        assert on_ranks(loaded_rows, 3, workload()) == [6, 4, 4]


def go_on(world: World, made: Workload, strategy: Any, states: list[State], steps: int) -> tuple[State, Any]:
    step = strategy.build(made, world)
    if states:
        step.load_state_dict(states[-1])
    for number in range(step.done, step.done + steps):
        step(step.source.at(number, step.data_shard))
    return step.state_dict(), step.predict(step.source.at(3, DataShard()))


def test_a_state_goes_on_in_other_parts_and_in_none() -> None:
    made = workload(optimizer=adam)
    with by_value(networks):
        whole, expected = on_ranks(go_on, 1, made, SingleDevice(), [], 8)[0]
        first = on_ranks(go_on, 3, made, HybridParallel(), [], 3)[2][0]
        second = on_ranks(go_on, 1, made, SingleDevice(), [first], 2)[0][0]
        last = on_ranks(go_on, 2, made, HybridParallel(exchange="rotate"), [second], 3)
    found, wanted = dict(last[0][0].tensors()), dict(whole.tensors())
    assert found.keys() == wanted.keys()
    assert max(float((found[key] - t).abs().max()) for key, t in wanted.items()) <= EXACT
    assert float((last[0][1] - expected).abs().max()) <= EXACT


def test_the_metrics_are_those_of_one_device() -> None:
    held_out = TensorDataset(networks.numbers(9, 2, 6, 6, seed=4), networks.classes(9, 3, seed=5))
    metrics = {"loss": F.cross_entropy, "accuracy": accuracy}
    evaluation = Evaluation(data=lambda: held_out, metrics=metrics, batch_size=4)
    found = []
    for strategy, workers in (("single_device", 1), ("hybrid_parallel", 2)):
        with by_value(networks), by_value(sys.modules[__name__]):
            launcher = Local(workers=workers, threads=1, device="cpu")
            trained = apportion.train(replace(workload(), evaluation=evaluation), strategy, launcher=launcher)
        found.append(trained.data["metrics"])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


# The exchange by itself


def rotated(world: World, sizes: list[int], width: int) -> list[tuple[int, list[Tensor]]]:
    group: Group = world.group()
    own = [torch.full((sizes[group.rank], width), float(group.rank)), torch.arange(sizes[group.rank]) + 10 * group.rank]
    return [(rank, [t.clone() for t in given]) for rank, given in rotation(own, sizes, group)]


@pytest.mark.parametrize("sizes", [[2, 1], [3, 0, 2], [0, 0, 1], [1, 2, 0, 5]])
def test_every_rank_sees_every_share_in_turn(sizes: list[int]) -> None:
    for found in on_ranks(rotated, len(sizes), sizes, 300_000):
        assert [rank for rank, _ in found] == [rank for rank, size in enumerate(sizes) if size]
        for rank, (wide, numbers) in found:
            assert torch.equal(wide, torch.full((sizes[rank], 300_000), float(rank)))
            assert numbers.tolist() == [10 * rank + i for i in range(sizes[rank])]


# What is refused


class Undecided(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if bool(x.sum() > 0) else x)


class Tallies(Named):
    """A graph would not count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Remembers(Named):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x) / self.calls


class Within(Named):
    """The layer that cannot be followed is not the network itself."""

    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if bool(x.sum() > 0) else x

    def __init__(self) -> None:
        super().__init__()
        self.features.append(Within.Deciding())


class Counts(Named):
    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1)) / x.shape[0]


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.out = nn.Conv2d(2, 1, 3), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(torch.relu(self.mix(self.conv(x).flatten(1)))))


class Twice(Again):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x.flatten(2)[:, :, :16]).unflatten(2, (4, 4))
        return self.out(self.conv(h).flatten(1).repeat(1, 4)) + self.mix.weight[:3, 0]


REFUSALS: list[tuple[Callable[[], Workload], dict[str, Any], str]] = [
    (lambda: networks.cases["mlp"](7), {}, "Sequential has no convolution .*use data_parallel, fully_sharded"),
    (
        lambda: workload(Undecided),
        {},
        "Undecided cannot be followed: at test_hybrid.*decides about control flow; so hybrid_parallel .*or use data",
    ),
    (lambda: workload(Tallies), {}, "Tallies cannot be followed: it changes its own calls; so hybrid_parallel"),
    (lambda: workload(Remembers), {}, "Remembers cannot be followed: it changes its own calls; so hybrid_parallel"),
    (lambda: workload(Within), {}, "forward of features.4 cannot be followed: at test_hybrid.*use data_parallel"),
    (lambda: workload(Counts), {}, "a value of type int goes into classifier.0"),
    (workload, {"data": "feature"}, "data='feature' must be a layer of Named, which has features, classifier"),
    (workload, {"tensor": "head"}, "tensor='head' must be a layer of Named"),
    (workload, {"data": "classifier", "tensor": "features"}, "classifier.0 comes after features"),
    (workload, {"tensor": "features"}, "features.0 comes after features"),
    (lambda: workload(Again), {"tensor": "out", "data": "mix"}, ""),
    (lambda: workload(Again), {"tensor": "mix"}, ""),
    (lambda: workload(Twice), {}, "mix.weight is used before and after the exchange"),
    (lambda: workload(), {"tensor": "classifier.3"}, ""),
    (lambda: workload(count=None), {"exchange": "rotate"}, "couples examples"),
    (lambda: workload(batch_size=1), {}, "batch_size=1 cannot feed 2 workers"),
    (lambda: networks.cases["two_optimizers"](7), {}, "update= calls the network"),
    (lambda: networks.cases["carried_state"](7), {}, "carry= gives every row a state"),
]


@pytest.mark.parametrize(("make", "options", "why"), REFUSALS)
def test_what_cannot_be_exact_is_refused_by_name(make: Callable[[], Workload], options: Any, why: str) -> None:
    if not why:
        assert_exact(prove(make(), 2, **options))
        return
    with pytest.raises(ValueError, match=why):
        prove(make(), 2, **options)


def test_an_exchange_has_a_name() -> None:
    with pytest.raises(ValueError, match='exchange=\'ring\' must be "all" or "rotate"'):
        HybridParallel(exchange="ring")  # type: ignore[arg-type]
