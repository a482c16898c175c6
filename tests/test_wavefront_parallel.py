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
WORDS, WIDTH = 7, 5


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
