"""Rows of a batch that are tied together: computed over the whole batch, or refused by name before the first step."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import networks
import numpy as np
import pytest
import torch
from proofs import assert_equal
from ranks import by_value
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.core.data.source import BatchSource
from apportion.core.strategy import Strategy
from apportion.parallel.batch_coupling.analysis import refuse_coupling, whole_batch_functions
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.pipeline_parallel import PipelineParallel

ROWS = 13


class Net(nn.Module):
    """Something between two layers."""

    def __init__(self, between: Callable[[Tensor], Tensor] | nn.Module = nn.Identity(), *, width: int = 12) -> None:  # noqa: B008
        super().__init__()
        self.first, self.last = nn.Linear(10, 12), nn.Linear(width, 3)
        self.between = between if isinstance(between, nn.Module) else Called(between)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class NormAct(nn.BatchNorm1d):
    """As timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        moments = self.running_mean, self.running_var
        return F.relu(F.batch_norm(x, *moments, self.weight, self.bias, self.training, self.momentum, self.eps))


class Calls(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class Instances(nn.InstanceNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 3, 4)).flatten(1)


def torchs(x: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)


def work(between: Any, *, batch: int = ROWS, width: int = 12, **options: Any) -> Workload:
    return networks.workload(
        lambda: Net(_fresh(between), width=width), networks.tabular(batch, 10, last=4), batch, **options
    )


def _fresh(between: Any) -> Any:
    return between() if isinstance(between, type) else copy.deepcopy(between)


def look(made: Workload) -> list[str]:
    torch.manual_seed(0)
    return whole_batch_functions(made.model(), made, BatchSource(made).sample, strategy="data_parallel")


def prove(made: Workload, strategy: Strategy, workers: int = 2) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        assert_equal(apportion.check(made, strategy, workers=workers, steps=4))


STATISTICS = {
    "subclass": NormAct(12),
    "subclass that calls its parent": Calls(12, affine=False),
    "cumulative": Calls(12, momentum=None),
    "function": lambda x: F.batch_norm(x, None, None, training=True),
    "torch.batch_norm": torchs,
    "instances": Instances(3, track_running_stats=True, affine=True),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("strategy", [DataParallel(), FullySharded()], ids=str)
def test_statistics_by_a_function_are_those_of_the_whole_batch(kind: str, strategy: Strategy) -> None:
    prove(work(STATISTICS[kind]), strategy)


@pytest.mark.processes
def test_a_rank_without_rows_takes_no_part_in_statistics_by_a_function() -> None:
    made = work(NormAct(12), batch=16)
    data = TensorDataset(networks.numbers(18, 10), networks.classes(18, 3))
    prove(networks.workload(made.model, lambda: data, 16), DataParallel(), workers=3)


@pytest.mark.parametrize("kind", STATISTICS)
def test_parts_of_a_batch_cannot_have_statistics_of_the_whole_one(kind: str) -> None:
    made = work(STATISTICS[kind])
    with pytest.raises(ValueError, match=r"would give (between|.*Called).* the statistics of a part of the batch"):
        refuse_coupling(made.model(), made, BatchSource(made).sample, strategy="map_reduce")


# What is refused


class Deviation(nn.Module):
    """Minibatch standard deviation: one more number for every row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1)


class Moving(nn.Module):
    """A mean of activations in a buffer."""

    def __init__(self, *, used: bool = True, new: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.used, self.new = used, new

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.new:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean if self.used else x


class Codebook(nn.Module):
    """VQ: the codes move towards what was given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 5)[:, None].repeat(1, 12))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            self.codes[nearest] = 0.5 * self.codes[nearest] + 0.5 * x.detach()
        return x + (self.codes[nearest] - x).detach()


class Averaging(torch.autograd.Function):
    """Every row gets the mean gradient of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


def noisy_mean(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) - x.mean(0)


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    """A product of means over the batch, as mixtures of experts balance theirs."""
    return F.cross_entropy(outputs, targets) + (outputs.softmax(1).mean(0) * outputs.mean(0)).sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


REFUSED: dict[str, tuple[Callable[[], Workload], str]] = {
    "deviation": (lambda: work(Deviation, width=13), r"between \(Deviation\).*rows beside it"),
    "mean": (lambda: work(lambda x: x - x.mean(0)), r"between \(Called\).*rows beside it"),
    "attention over the batch": (
        lambda: work(lambda x: F.scaled_dot_product_attention(x, x, x)), r"between \(Called\).*rows beside it"
    ),
    "mean beside draws": (lambda: work(noisy_mean), r"between \(Called\).*rows beside it"),
    "moving mean": (lambda: work(Moving), r"the buffer between\.mean"),
    "moving mean that nobody uses": (lambda: work(Moving(used=False)), r"the buffer between\.mean"),
    "moving mean, reassigned": (lambda: work(Moving(new=True)), r"the buffer between\.mean"),
    "codebook": (lambda: work(Codebook), r"the buffer between\.codes"),
    "backward": (lambda: work(Averaging.apply), r"the gradient of first\.(weight|bias)"),
    "loss": (lambda: work(nn.Tanh(), loss=balanced), "the loss couples the rows of a batch"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_rows_that_are_tied_together_are_refused_by_name(kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(ValueError, match=why) as caught:
        look(make())
    assert "use single_device" in str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy",
    [DataParallel(), DataParallel(microbatches=2), MapReduce(part=4), FullySharded(), PipelineParallel(microbatches=4)],
    ids=str,
)
def test_every_strategy_that_divides_the_batch_refuses_it(strategy: Strategy) -> None:
    with by_value(networks), by_value(sys.modules[__name__]), pytest.raises(ValueError, match=r"rows|the batch"):
        apportion.check(work(lambda x: x - x.mean(0)), strategy, workers=2, steps=1)


@pytest.mark.processes
def test_replicas_of_a_network_in_parts_refuse_it() -> None:
    strategy = DataParallel(of=PipelineParallel(microbatches=1), replicas=2)
    with by_value(networks), by_value(sys.modules[__name__]), pytest.raises(ValueError, match="rows beside it"):
        apportion.check(work(lambda x: x - x.mean(0)), strategy, workers=4, steps=1)


# What is none of it


class Transposed(nn.Module):
    """The batch is dimension 1 on the way."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.out = kind(5, 6, dropout=0.5, num_layers=2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x.view(-1, 2, 5).transpose(0, 1))[0][-1])


class Branches(nn.Module):
    """Which way a row goes its own numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(10, 3), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left = x.sum(1) > 0
        y = x.new_zeros(len(x), 3)
        if left.any():
            y[left] = F.dropout(self.left(x[left]), 0.2, self.training)
        if (~left).any():
            y[~left] = self.right(x[~left])
        return {"logits": y}


class Paths(nn.Module):
    """Stochastic depth: draws of its own, one a row, and one for all."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1).bernoulli_(0.7)
        return x * kept * (2.0 if random.random() < 0.5 else 1.0) + float(np.random.rand())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True)
        self.embed, self.encoder, self.out = nn.Linear(5, 6), nn.TransformerEncoder(layer, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(x.view(-1, 2, 5))).mean(1))


def chaotic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Rounding becomes anything in sixty iterations of the logistic map."""
    w = torch.sigmoid(outputs)
    for _ in range(60):
        w = 4 * w * (1 - w)
    return w.mean()


def logits(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], targets)


def plain(model: Callable[[], nn.Module], **options: Any) -> Workload:
    return networks.workload(model, networks.tabular(ROWS, 10), ROWS, **options)


def uncounted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=0)


APART: dict[str, Callable[[], Workload]] = {
    "dropout": lambda: work(nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.2))),
    "batch normalisation": lambda: work(nn.BatchNorm1d(12)),
    "layer normalisation": lambda: work(nn.LayerNorm(12)),
    "lstm": lambda: plain(lambda: Transposed(nn.LSTM)),
    "gru": lambda: plain(lambda: Transposed(nn.GRU)),
    "attention": lambda: plain(Attends),
    "branches": lambda: plain(Branches, loss=logits),
    "draws": lambda: work(Paths),
    "spectral norm": lambda: work(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12))),
    "tokens that do not count": lambda: work(nn.Tanh(), loss=uncounted, count=lambda t: float((t != 0).sum())),
    "a loss that is said to couple": lambda: work(nn.Tanh(), loss=balanced, count=None),
    "a sum, which a proof tells": lambda: work(nn.Tanh(), loss=summed),
    "a wrong count, which a proof tells": lambda: work(nn.Tanh(), count=lambda t: float((t > 0).sum()) + len(t)),
    "chaos": lambda: work(nn.Tanh(), loss=chaotic),
    "a hook on what a row gives": lambda: work(Called(_clamped)),
    "half precision within": lambda: work(lambda x: x.bfloat16().cumsum(1).to(x.dtype)),
    "cannot be called with few rows": lambda: work(lambda x: x[12] + x),
}


def _clamped(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return x


@pytest.mark.parametrize("kind", APART)
def test_what_ties_no_rows_together_is_not_refused(kind: str) -> None:
    made = APART[kind]()
    assert look(made) == []


@pytest.mark.parametrize("name", networks.cases)
def test_none_of_the_networks_of_the_tests_is_refused(name: str) -> None:
    made = networks.cases[name](16)
    found = look(made)
    assert not found or "norm" in name


def test_a_look_leaves_no_trace() -> None:
    made = work(nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.5), Paths()))
    torch.manual_seed(0)
    model, source = made.model(), BatchSource(made)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    whole_batch_functions(model, made, source.sample, strategy="data_parallel")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
    assert source.seconds == 0.0


# Hooks


def hooked(register: Callable[[nn.Parameter], object], **options: Any) -> Workload:
    def model() -> nn.Module:
        made = networks.perceptron()
        for p in made.parameters():
            register(p)
        return made

    return networks.workload(model, networks.tabular(ROWS, 10), ROWS, **options)


def clamps(p: nn.Parameter) -> None:
    p.register_hook(lambda g: g.clamp(-1e-2, 1e-2))


def clamps_after(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.2, 0.2)


def signs(p: nn.Parameter) -> None:
    p.register_hook(lambda g: g / (g.norm() + 1e-3))
    p.register_post_accumulate_grad_hook(clamps_after)
    p.register_hook(lambda g: 0 * g).remove()


@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy",
    [DataParallel(), DataParallel(microbatches=2), MapReduce(part=4), PipelineParallel(microbatches=4)],
    ids=str,
)
def test_hooks_are_called_with_the_gradient_of_the_whole_batch(strategy: Strategy) -> None:
    prove(hooked(signs, clip_grad_norm=0.5), strategy)


@pytest.mark.processes
def test_a_hook_of_one_parameter_is_called_with_its_whole_gradient_where_a_network_is_in_parts() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 40), nn.Linear(40, 3)
        )
        clamps(made[0].weight)
        return made

    data = TensorDataset(networks.numbers(26, 1, 4, 4), networks.classes(26, 3))
    prove(networks.workload(model, lambda: data, ROWS), HybridParallel())


@pytest.mark.processes
def test_shards_refuse_a_hook_by_name() -> None:
    with (
        by_value(networks), by_value(sys.modules[__name__]), contextlib.ExitStack() as stack,
    ):  # fmt: skip
        stack.enter_context(pytest.raises(ValueError, match=r"0\.weight has a hook"))
        apportion.check(hooked(clamps), FullySharded(), workers=2, steps=1)
