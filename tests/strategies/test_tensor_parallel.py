"""tensor_parallel against one device, on real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from networks import adam
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Evaluation, Workload, accuracy
from apportion.comm.world import World
from apportion.core.sampler import DataShard
from apportion.core.strategy import State
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.proof import Proof
from apportion.strategies.single_device import SingleDevice
from apportion.strategies.tensor_parallel import TensorParallel

pytestmark = pytest.mark.processes

EVERYTHING = TensorParallel(min_width=1)


def prove(workload: Workload, workers: int, strategy: TensorParallel = EVERYTHING, steps: int = 8) -> Proof:
    with by_value(networks), by_value(sys.modules[__name__]):
        return apportion.check(workload, strategy, workers=workers, steps=steps)


def assert_exact(proof: Proof, by_design: str = "") -> None:
    assert_equal(proof, by_design=bool(by_design))
    assert by_design in " ".join(proof.by_design)
    assert len(proof.by_design) == bool(by_design), "one line, and no draws of the strategy's own"


class Transformer(nn.Module):
    """Tokens in, logits of the next ones out, in every way that a layer can be sliced."""

    def __init__(self, vocabulary: int = 11, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6, padding_idx=0)
        layer = nn.TransformerEncoderLayer(6, 3, 7, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, vocabulary)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.norm(self.encoder(self.embed(tokens), mask))).transpose(1, 2)


def tokens(batch_size: int, vocabulary: int = 11) -> Callable[[], TensorDataset]:
    n = networks.rows(batch_size)
    return lambda: TensorDataset(networks.classes(n, vocabulary, 5), networks.classes(n, vocabulary, 5, seed=2))


def transformer(optimizer: Any = adam, **options: Any) -> Workload:
    return networks.workload(
        Transformer, tokens(6), 6, optimizer=optimizer, loss=nn.CrossEntropyLoss(ignore_index=3), **options
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.layers, self.out = (
            nn.Embedding(7, 5),
            kind(5, 5, num_layers=2, batch_first=True),
            nn.Linear(5, 7),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x))[0]).transpose(1, 2)


def recurrent(kind: type[nn.RNNBase], optimizer: Any) -> Workload:
    return networks.workload(lambda: Recurrent(kind), tokens(6, 7), 6, optimizer=optimizer, clip_grad_norm=0.5)


CASES: dict[str, Callable[[Any], Workload]] = {
    "mlp": lambda optimizer: replace(networks.cases["mlp"](61), optimizer=optimizer),
    "transformer": lambda optimizer: transformer(optimizer),
    "lstm": lambda optimizer: recurrent(nn.LSTM, optimizer),
    "gru": lambda optimizer: recurrent(nn.GRU, optimizer),
}


@pytest.mark.parametrize(("workers", "optimizer"), networks.sizes())
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, optimizer: Any, workers: int) -> None:
    assert_exact(prove(CASES[name](optimizer), workers))


ALWAYS = (
    "cnn", "batch_norm_1d_without_length", "counted_tokens", "tied_weights", "clipped", "dict_inputs", "carried_state",
    "frozen_and_unused_parameters", "parameter_groups", "class_weights", "coupled_examples", "two_optimizers",
    "buffers",
)  # fmt: skip
REFUSED = {
    "two_optimizers": "update= calls the network",
    "update_with_a_shard_without_loss_terms": "update= calls the network",
}


def everything() -> list[object]:
    made: list[object] = []
    for name in networks.cases:
        for workers, batch_size in ((1, 61), (2, 61), (3, 64)):
            always = name in ALWAYS and workers == 2
            made.append(pytest.param(name, workers, batch_size, marks=() if always else pytest.mark.slow))
    return made


@pytest.mark.parametrize(("name", "workers", "batch_size"), everything())
def test_every_kind_of_workload_equals_one_device(name: str, workers: int, batch_size: int) -> None:
    if name not in REFUSED:
        assert_exact(prove(networks.cases[name](batch_size), workers))
        return
    with pytest.raises(ValueError, match=REFUSED[name]):
        prove(networks.cases[name](batch_size), workers)


@pytest.mark.thorough
def test_dropout_is_named() -> None:
    workload = replace(transformer(), model=lambda: Transformer(dropout=0.5))
    proof = prove(workload, 2)
    assert_exact(proof, by_design="dropout(p=0.5)")
    assert len(proof.by_design) == 1  # the seeds of the ranks' own draws are not the network's


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(2, 600, bias=False), nn.Dropout(0.5), nn.Linear(600, 1, bias=False)
        nn.init.ones_(self.up.weight)
        nn.init.ones_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)))


def dropped(world: World) -> list[Any]:
    """Which hidden units were dropped in two steps, and what was drawn elsewhere then."""
    data = TensorDataset(torch.ones(4, 2), torch.zeros(4, 1))
    workload = networks.workload(Dropped, lambda: data, 4, loss=F.mse_loss)
    step, told = TensorParallel().build(workload, world), []
    hidden: list[Tensor] = []
    step.model.down.register_forward_pre_hook(lambda _, given: hidden.append(given[0].detach()[0] != 0))  # type: ignore[union-attr]
    for number in range(2):
        assert step.data_shard is not None
        step(step.source.at(number, step.data_shard))
        told.append(float(torch.rand(())))
    return [*hidden, told]


def test_every_rank_drops_units_of_its_own_and_draws_the_same_elsewhere() -> None:
    with by_value(networks):
        (first, second, told), (other, _, as_told) = on_ranks(dropped, 2)
    assert told == as_told
    for mask in (first, second, other):
        assert 0.4 < mask.double().mean() < 0.6
    for a, b in ((first, second), (first, other)):
        assert 0.4 < (a == b).double().mean() < 0.6


# What each rank holds, and gives


def holding(world: World, workload: Workload, strategy: TensorParallel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in strategy.build(workload, world).model.named_parameters()}


def test_each_rank_holds_its_slices_and_nothing_else_of_a_sliced_layer() -> None:
    wide = networks.workload(
        lambda: nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 50)),
        networks.tabular(6, 10, many=50), 6,
    )  # fmt: skip
    with by_value(networks):
        first, second, third = on_ranks(holding, 3, wide, TensorParallel())
    assert [r["0.weight"] for r in (first, second, third)] == [(3, 10), (2, 10), (2, 10)]
    assert [r["0.bias"] for r in (first, second, third)] == [(3,), (2,), (2,)]
    assert [r["2.weight"] for r in (first, second, third)] == [(40, 3), (40, 2), (40, 2)]
    assert [r["2.bias"] for r in (first, second, third)] == [(40,), (0,), (0,)]
    assert [r["4.weight"] for r in (first, second, third)] == [(17, 40), (17, 40), (16, 40)]
    with by_value(networks):
        narrow = on_ranks(holding, 2, wide, TensorParallel(min_width=41))
    assert narrow[0]["4.weight"] == (50, 40)
    with by_value(networks):
        alone = on_ranks(
            holding, 2, networks.workload(lambda: nn.Linear(10, 3), networks.tabular(6, 10), 6), TensorParallel()
        )
    assert alone[1]["weight"] == (1, 10), "a network of narrow layers alone is sliced all the same"


def go_on(world: World, workload: Workload, strategy: Any, states: list[State], steps: int) -> tuple[State, Any]:
    """From the last of these states; and what is predicted then."""
    step = strategy.build(workload, world)
    if states:
        step.load_state_dict(states[-1])
    for number in range(step.done, step.done + steps):
        step(step.source.at(number, step.data_shard))
    return step.state_dict(), step.predict(step.source.at(0, DataShard()))


@pytest.mark.parametrize("name", ["transformer", "lstm"])
@pytest.mark.thorough
def test_a_state_goes_on_in_other_slices_and_in_none(name: str) -> None:
    workload = CASES[name](adam)
    with by_value(networks):
        whole, expected = on_ranks(go_on, 1, workload, SingleDevice(), [], 8)[0]
        first = on_ranks(go_on, 3, workload, EVERYTHING, [], 3)[2][0]
        second = on_ranks(go_on, 1, workload, SingleDevice(), [first], 2)[0][0]
        third = on_ranks(go_on, 4, workload, EVERYTHING, [second], 2)[0][0]
        last = on_ranks(go_on, 2, workload, EVERYTHING, [third], 1)
    found, wanted = dict(last[0][0].tensors()), dict(whole.tensors())
    assert found.keys() == wanted.keys()
    assert max(float((found[key] - t).abs().max()) for key, t in wanted.items()) <= EXACT
    assert float((last[0][1] - expected).abs().max()) <= EXACT
    assert last[1][1] is None


def test_the_metrics_and_the_checkpoint_are_those_of_one_device(tmp_path: Any) -> None:
    held_out = TensorDataset(networks.classes(9, 11, 5, seed=4), networks.classes(9, 11, 5, seed=5))
    metrics = {"loss": F.cross_entropy, "accuracy": accuracy}
    evaluation = Evaluation(data=lambda: held_out, metrics=metrics, batch_size=4)
    workload = replace(transformer(), evaluation=evaluation)
    found = {}
    for name, strategy, workers in (("one", "single_device", 1), ("many", EVERYTHING, 2)):
        with by_value(networks), by_value(sys.modules[__name__]):
            launcher = Local(workers=workers, threads=1, device="cpu")
            trained = apportion.train(workload, strategy, launcher=launcher, run_dir=tmp_path / name)
        found[name] = trained.data["metrics"]
    assert found["many"] == pytest.approx(found["one"], rel=1e-9)
    one, many = (apportion.load(tmp_path / name, model=lambda: Transformer().double()).state_dict() for name in found)
    assert one.keys() == many.keys()
    assert all(torch.allclose(many[key], t, atol=EXACT) for key, t in one.items())


# What is refused


def test_a_network_without_a_layer_to_slice_is_refused_by_name() -> None:
    convolutions = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.BatchNorm1d(8))  # noqa: E731
    workload = networks.workload(convolutions, networks.tabular(6, 1, 4, 4), 6)
    with pytest.raises(
        ValueError, match=r"no layer that it can slice \(there are Conv2d, BatchNorm1d\).*conv_parallel"
    ):
        prove(workload, 2)


def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Adafactor is not known to update each weight by itself"):
        prove(replace(networks.cases["mlp"](61), optimizer=lambda p: torch.optim.Adafactor(p)), 2)


@pytest.mark.parametrize("width", [0, 1.5])
def test_a_width_is_a_whole_number(width: Any) -> None:
    with pytest.raises(ValueError, match=f"min_width={width} must be a whole number"):
        TensorParallel(min_width=width)
