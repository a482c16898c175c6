"""wavefront_parallel: the layers of a recurrent net on different workers, a chunk of time apart, are the same net."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import by_value, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.batch import Batches
from apportion.deal import DataShard
from apportion.parallel.recurrent_cut import cut
from apportion.parallel.recurrent_layer import Layer, LSTMLayer, TorchLayer, chunk_length, chunks, layer
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel
from apportion.strategy import State
from apportion.world import World

EXACT = 1e-10
WORDS = 9


class Letters(nn.Module):
    """A language model: embedding, recurrent layers, a linear layer."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.net = kind(5, 6, num_layers=layers, **options)
        self.out = nn.Linear(options.get("proj_size", 6), WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h, _ = self.net(self.embed(tokens))
        return self.out(h).transpose(1, 2)


class Carried(Letters):
    def forward(self, tokens: Tensor, state: Any) -> Any:  # type: ignore[override]
        h, state = self.net(self.embed(tokens), state)
        return self.out(h).transpose(1, 2), state


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sentences(time: int, rows: int = 5) -> Callable[[], TensorDataset]:
    n = networks.rows(rows)
    return lambda: TensorDataset(networks.classes(n, WORDS, time), networks.classes(n, WORDS, time, seed=2))


def letters(layers: int, *, time: int = 7, rows: int = 5, kind: Any = nn.LSTM, **options: Any) -> Workload:
    made = {name: options.pop(name) for name in ("bias", "proj_size", "dropout", "nonlinearity") if name in options}
    model = lambda: Letters(kind, layers, batch_first=True, **made)  # noqa: E731
    return networks.workload(model, sentences(time, rows), rows, **options)


def silence(layers: int, many: int = 2) -> Callable[[int], Any]:
    one = lambda n: torch.zeros(layers, n, 6)  # noqa: E731
    return lambda n: (one(n), one(n)) if many == 2 else one(n)


def carried(layers: int, kind: Any = nn.LSTM, **options: Any) -> Workload:
    return networks.workload(
        lambda: Carried(kind, layers, batch_first=True), sentences(7), 5,
        order="sequential", carry=silence(layers, 2 if kind is nn.LSTM else 1), **options,
    )  # fmt: skip


def prove(workload: Workload, workers: int, chunk: int | None = 2, steps: int = 8) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, WavefrontParallel(chunk=chunk), workers=workers, steps=steps)
    (found,) = proof.rounds
    assert found.precision == "float64"
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [networks.momentum, adam])
def test_equals_one_device(workers: int, optimizer: Any) -> None:
    prove(letters(5, optimizer=optimizer, clip_grad_norm=0.5), workers)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_carried_state_goes_on_from_batch_to_batch(kind: Any, workers: int) -> None:
    prove(carried(3, kind, clip_grad_norm=1.0), workers)


OTHERS = {
    "gru": (3, {"kind": nn.GRU}),
    "rnn_relu": (2, {"kind": nn.RNN, "nonlinearity": "relu"}),
    "rnn_tanh": (2, {"kind": nn.RNN}),
    "projected": (3, {"proj_size": 4}),
    "without_bias": (3, {"bias": False}),
    "gru_without_bias": (2, {"kind": nn.GRU, "bias": False}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_layer_equals_one_device(name: str) -> None:
    layers, options = OTHERS[name]
    prove(letters(layers, **options), 2, steps=4)


class Classifier(nn.Module):
    """Time-major; of sequences one class each, from the last state of the upper layers; the initial state is made in
    the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net, self.out = nn.LayerNorm(4), nn.LSTM(4, 6, 3), nn.Linear(12, 3)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        begun = torch.ones(3, x.size(0), 6, dtype=x.dtype)
        _, (h, c) = self.net(self.norm(x.transpose(0, 1)), (begun, begun * 0.5))
        return self.out(torch.cat([h[-1], c[-2]], 1))


class Tied(nn.Module):
    """One matrix for the words that go in and those that come out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net, self.out = nn.Embedding(WORDS, 6), nn.LSTM(6, 6, 2, batch_first=True), nn.Linear(6, WORDS)
        self.out.weight = self.embed.weight
        self.net.weight_hh_l1.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.net(self.embed(tokens))[0]).transpose(1, 2)


class Masked(nn.Module):
    """Two inputs, of which what comes after the layers takes one; and a batch normalisation there."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.out = nn.LSTM(4, 6, 2, batch_first=True), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, weights: Tensor, scale: float = 0.5, state: Any = None) -> Tensor:
        h = self.net(self.drop(x), state)[0] * weights.unsqueeze(2) * scale
        return self.out(self.norm(h.sum(1)))


class Pairs(networks.Dataset[Any]):
    def __len__(self) -> int:
        return 17  # three batches of five and one of two: a normalisation refuses a single row

    def __getitem__(self, i: int) -> Any:
        return (networks.numbers(7, 4, seed=i), networks.numbers(7, seed=99 + i)), i % 3


def classified(n: int = 16) -> TensorDataset:
    return TensorDataset(networks.numbers(n, 7, 4), networks.classes(n, 3))


MODELS: dict[str, Callable[[], Workload]] = {
    "from_the_last_states": lambda: networks.workload(Classifier, classified, 5),
    "tied_and_frozen_weights": lambda: networks.workload(Tied, sentences(7), 5, optimizer=adam, clip_grad_norm=0.5),
    "two_inputs_and_a_normalisation": lambda: networks.workload(Masked, Pairs, 5, steps=6),
    "the_layers_alone": lambda: networks.workload(
        lambda: nn.LSTM(4, 3, 2, batch_first=True),
        lambda: TensorDataset(networks.numbers(16, 7, 4), networks.numbers(16, 7, 3)),
        5, loss=lambda outputs, targets: F.mse_loss(outputs[0], targets) + outputs[1][1].square().mean(),
    ),
    "tokens_counted": lambda: networks.workload(
        lambda: Letters(nn.LSTM, 2, batch_first=True), lambda: networks.padded(16), 5, count=networks.real_tokens,
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=-1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_around_the_layers_equals_one_device(name: str, workers: int) -> None:
    prove(MODELS[name](), workers)


def test_dropout_between_layers_is_named_and_the_rest_is_equal() -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(letters(3, dropout=0.5), WavefrontParallel(chunk=3), workers=2, steps=3)
    assert proof.holds
    assert any("dropout=0.5" in line for line in proof.by_design)


def test_the_runs_own_precision_differs_by_its_own_rounding() -> None:
    workload = replace(letters(3, time=12, rows=4), precision="float32")
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, WavefrontParallel(), workers=2, steps=6)
    wide, own = proof.rounds
    assert wide.worst.absolute <= EXACT
    assert own.precision == "float32"
    assert own.verdict == "equal", own
