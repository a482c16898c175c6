"""Workloads that between them use everything a workload can hold: each a function of the batch size.

The data sets end in a short batch of one example (two where batch normalisation refuses a single one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from apportion import Workload

STEPS = 8
cases: dict[str, Callable[[int], Workload]] = {}
Case = Callable[[int], Workload]


def case(make: Case) -> Case:
    cases[make.__name__] = make
    return make


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(n: int, many: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, many, (n, *shape), generator=torch.Generator().manual_seed(seed))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


EPS = 1e-5
"""Of Adam: the gradient of a bias before a normalisation is rounding alone, of which 1e-8 would make a step."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=EPS)


def sizes() -> list[object]:
    """(workers, optimizer): each number of workers under both optimizers when asked for, and three of these always."""
    import pytest  # which whoever only wants the networks need not have

    always = ((1, adam), (2, momentum), (3, adam))
    every = [(workers, optimizer) for workers in (1, 2, 3, 4) for optimizer in (momentum, adam)]
    return [pytest.param(*at, marks=() if at in always else pytest.mark.slow) for at in every]


def workload(model: Callable[[], nn.Module], data: Callable[[], Any], batch_size: int, **options: Any) -> Workload:
    settings: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": momentum,
        "steps": STEPS,
        "precision": "float64",
        **options,
    }
    return Workload(model=model, data=data, batch_size=batch_size, **settings)


def rows(batch_size: int, last: int = 1) -> int:
    """Examples in an epoch of three whole batches and a short one."""
    return 3 * batch_size + last


def tabular(batch_size: int, *shape: int, last: int = 1, many: int = 3) -> Callable[[], TensorDataset]:
    n = rows(batch_size, last)
    return lambda: TensorDataset(numbers(n, *shape), classes(n, many))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))


@case
def mlp(batch_size: int) -> Workload:
    return workload(perceptron, tabular(batch_size, 10), batch_size)


@case
def cnn(batch_size: int) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.LocalResponseNorm(4), nn.Flatten(),
            nn.Linear(8 * 16, 3),
        )  # fmt: skip

    return workload(model, tabular(batch_size, 3, 8, 8), batch_size)


# Batch normalisation


def normalised(norm: nn.Module, *, dims: int) -> nn.Module:
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return nn.Sequential(convolution(2, 4, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4**dims, 3))


@case
def batch_norm_1d(batch_size: int) -> Workload:
    model = lambda: normalised(nn.BatchNorm1d(4), dims=1)  # noqa: E731
    return workload(model, tabular(batch_size, 2, 4), batch_size)


@case
def batch_norm_1d_without_length(batch_size: int) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    return workload(model, tabular(batch_size, 6, last=2), batch_size)


@case
def batch_norm_2d(batch_size: int) -> Workload:
    return workload(lambda: normalised(nn.BatchNorm2d(4), dims=2), tabular(batch_size, 2, 4, 4), batch_size)


@case
def batch_norm_3d(batch_size: int) -> Workload:
    return workload(lambda: normalised(nn.BatchNorm3d(4), dims=3), tabular(batch_size, 2, 4, 4, 4), batch_size)


@case
def batch_norm_cumulative(batch_size: int) -> Workload:
    model = lambda: normalised(nn.BatchNorm2d(4, momentum=None), dims=2)  # noqa: E731
    return workload(model, tabular(batch_size, 2, 4, 4), batch_size)


@case
def batch_norm_without_weights(batch_size: int) -> Workload:
    model = lambda: normalised(nn.BatchNorm2d(4, affine=False), dims=2)  # noqa: E731
    return workload(model, tabular(batch_size, 2, 4, 4), batch_size)


@case
def batch_norm_without_running_statistics(batch_size: int) -> Workload:
    model = lambda: normalised(nn.BatchNorm2d(4, track_running_stats=False), dims=2)  # noqa: E731
    return workload(model, tabular(batch_size, 2, 4, 4), batch_size)


@case
def batch_norm_frozen(batch_size: int) -> Workload:
    def model() -> nn.Module:
        norm = nn.BatchNorm2d(4)
        norm.weight.requires_grad_(False)
        return normalised(norm.eval(), dims=2)

    return workload(model, tabular(batch_size, 2, 4, 4), batch_size)


class Twice(nn.Module):
    """One normalisation that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.norm(self.second(x))))


@case
def batch_norm_used_twice(batch_size: int) -> Workload:
    return workload(Twice, tabular(batch_size, 6, last=2), batch_size)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = normalised(nn.BatchNorm2d(4), dims=2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.contiguous(memory_format=torch.channels_last))


@case
def batch_norm_channels_last(batch_size: int) -> Workload:
    return workload(ChannelsLast, tabular(batch_size, 2, 4, 4), batch_size)


# Parameters that are shared, frozen, unused


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(tokens).mean(1)))


@case
def tied_weights(batch_size: int) -> Workload:
    n = rows(batch_size)
    return workload(Tied, lambda: TensorDataset(classes(n, 12, 5), classes(n, 12, seed=2)), batch_size)


class Partly(nn.Module):
    """A frozen layer, a layer that is never called, and one that is called at every other example's wish."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused, self.sometimes = nn.Linear(10, 8), nn.Linear(10, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(x))
        if bool((x[:, 0] > 1.8).any()):
            h = h + self.sometimes(h) * (x[:, :1] > 1.8)
        return self.out(h)


@case
def frozen_and_unused_parameters(batch_size: int) -> Workload:
    """With weight decay and momentum an unused parameter must not move; one used on a single rank must."""
    return workload(Partly, tabular(batch_size, 10), batch_size)


@case
def parameters_without_optimizer(batch_size: int) -> Workload:
    def optimizer(named: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in named if not name.startswith("0")], lr=0.1, momentum=0.9)

    return workload(perceptron, tabular(batch_size, 10), batch_size, optimizer=optimizer, clip_grad_norm=0.5)


@case
def parameter_groups(batch_size: int) -> Workload:
    def optimizer(named: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(named)  # type: ignore[assignment]
        biases = {"params": [p for name, p in named if "bias" in name], "lr": 0.2, "weight_decay": 0.0}
        weights = {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.01}
        return torch.optim.SGD([biases, weights], lr=0.1, momentum=0.8, nesterov=True)

    return workload(perceptron, tabular(batch_size, 10), batch_size, optimizer=optimizer)


class Scattered(nn.Module):
    """Some rows of the embedding are looked up by one rank alone, none by a batch without its column."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(50, 6, sparse=sparse), nn.EmbeddingBag(20, 6, sparse=sparse)
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).sum(1) + self.bag(tokens % 20))


@case
def sparse_embeddings(batch_size: int) -> Workload:
    n = rows(batch_size)
    return workload(
        lambda: Scattered(sparse=True), lambda: TensorDataset(classes(n, 50, 4), classes(n, 3)), batch_size,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip


class Counting(nn.Module):
    """Buffers of its own that do not depend on the rows: the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.scale = self.scale * 1.01  # a new tensor under the old name
        return self.net(x) * self.scale


@case
def buffers(batch_size: int) -> Workload:
    return workload(Counting, tabular(batch_size, 10), batch_size)


@case
def large_parameters(batch_size: int) -> Workload:
    """Above what is packed: these gradients are summed where they lie."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3))

    return workload(model, tabular(batch_size, 10), batch_size)


# Inputs, targets and losses of other shapes


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": self.left(left) + self.right(right), "left": self.left(left)}


class Pairs(Dataset[Any]):
    def __init__(self, n: int, *, named: bool) -> None:
        self.left, self.right, self.classes, self.named = numbers(n, 4), numbers(n, 6, seed=3), classes(n, 3), named

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, i: int) -> Any:
        pair = self.left[i], self.right[i]
        inputs = {"left": pair[0], "right": pair[1]} if self.named else pair
        return inputs, {"class": self.classes[i], "both": (self.left[i, :3], self.right[i, 0])}


def two_losses(outputs: Any, targets: Any) -> Tensor:
    near = (outputs["left"] - targets["both"][0]).square().mean() + targets["both"][1].mean() * 0.1
    return F.cross_entropy(outputs["sum"], targets["class"]) + near


@case
def tuple_inputs_and_targets_in_a_tree(batch_size: int) -> Workload:
    return workload(Two, lambda: Pairs(rows(batch_size), named=False), batch_size, loss=two_losses)


@case
def dict_inputs(batch_size: int) -> Workload:
    return workload(Two, lambda: Pairs(rows(batch_size), named=True), batch_size, loss=two_losses)


@case
def loss_of_shape_one(batch_size: int) -> Workload:
    loss = lambda outputs, targets: F.cross_entropy(outputs, targets).reshape(1)  # noqa: E731
    return workload(perceptron, tabular(batch_size, 10), batch_size, loss=loss)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.embed(tokens)).transpose(1, 2)
        return self.out(self.norm(h).transpose(1, 2))


def padded(n: int) -> TensorDataset:
    """Sentences of 0 to 7 tokens; most have none, so a short shard may hold no loss term."""
    lengths = classes(n, 12, seed=5) - 4
    targets = classes(n, 9, 7, seed=6).masked_fill(torch.arange(7) >= lengths[:, None], -1)
    targets[n - 1, 0] = 1
    return TensorDataset(classes(n, 9, 7), targets)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def masked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same by hand: without a token it is 0 / 0, and so is its gradient."""
    real = (targets != -1).to(outputs.dtype)
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    return (each * real.flatten()).sum() / real.sum()


def real_tokens(targets: Tensor) -> float:
    return float((targets != -1).sum())


@case
def counted_tokens(batch_size: int) -> Workload:
    return workload(Tokens, lambda: padded(rows(batch_size)), batch_size, loss=token_loss, count=real_tokens)


@case
def counted_tokens_without_norm(batch_size: int) -> Workload:
    return workload(
        PlainTokens, lambda: padded(rows(batch_size)), batch_size, loss=token_loss, count=real_tokens
    )  # fmt: skip


@case
def a_shard_without_loss_terms(batch_size: int) -> Workload:
    """Three examples a batch, most without tokens: on three ranks some count nothing in nearly every step."""
    return workload(
        Tokens, lambda: padded(10), 3, loss=masked_loss, count=lambda t: real_tokens(t), order="sequential"
    )  # fmt: skip


WEIGHTS = (0.2, 3.0, 1.0)


@case
def class_weights(batch_size: int) -> Workload:
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    return workload(
        perceptron, tabular(batch_size, 10), batch_size,
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets, weight=weights),
        count=lambda targets: weights[targets].sum().item(),
    )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(first), self.net(second)


def contrast(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    a, b = (F.normalize(o, dim=1) for o in outputs)
    return F.cross_entropy(a @ b.t() / 0.5, torch.arange(len(a))) + 0.01 * (targets * a[:, 0]).sum()


class Views(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.x = numbers(n, 8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return (self.x[i], self.x[i] * 0.9 + 0.1), self.x[i, 0]


@case
def coupled_examples(batch_size: int) -> Workload:
    return workload(Encoder, lambda: Views(rows(batch_size, 2)), batch_size, loss=contrast, count=None)


# More than one optimizer


class Game(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def game(step: Any, batch: Any) -> dict[str, Tensor]:
    real, noise = batch.inputs, batch.draws().normal(3)
    model = step.model
    fake = model.generator(noise)
    told = torch.cat([model.critic(real), model.critic(fake.detach())])
    truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(told)
    critic = step.minimize(F.binary_cross_entropy_with_logits(told, truth), batch, optimizer="critic")
    opinion = model.critic(model.generator(noise))
    wish = F.binary_cross_entropy_with_logits(opinion, torch.ones_like(opinion))
    return {"critic": critic, "generator": step.minimize(wish, batch, optimizer="generator")}


def players(named: Iterator[tuple[str, nn.Parameter]]) -> dict[str, torch.optim.Optimizer]:
    named = list(named)  # type: ignore[assignment]
    mine = {who: [(n, p) for n, p in named if n.startswith(who)] for who in ("generator", "critic")}
    return {
        "generator": torch.optim.Adam(mine["generator"], lr=0.01),
        "critic": torch.optim.SGD(mine["critic"], lr=0.05, momentum=0.5),
    }


@case
def two_optimizers(batch_size: int) -> Workload:
    return workload(
        Game, tabular(batch_size, 6, last=2), batch_size, loss=None, update=game, optimizer=players,
        clip_grad_norm=0.3, schedule=lambda o, steps: torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=steps),
    )  # fmt: skip


def update_tokens(step: Any, batch: Any) -> dict[str, Tensor]:
    loss = step.minimize(masked_loss(step.model(batch.inputs), batch.targets), batch)
    return {"loss": loss, "double": 2 * loss}


class PlainTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(tokens)))


@case
def update_with_a_shard_without_loss_terms(batch_size: int) -> Workload:
    return workload(
        PlainTokens, lambda: padded(10), 3, loss=None, update=update_tokens, count=real_tokens, order="sequential"
    )


# Recurrent


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(7, 5),
            nn.LSTM(5, 6, num_layers=2, batch_first=True),
            nn.Linear(6, 7),
        )

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, state = self.lstm(self.embed(tokens), state)
        return self.out(h).transpose(1, 2), state


def silence(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, n, 6), torch.zeros(2, n, 6)


@case
def carried_state(batch_size: int) -> Workload:
    """Lanes that the workers do not divide, and data that the lanes do not divide."""
    n = 3 * batch_size + 1
    return workload(
        Letters, lambda: TensorDataset(classes(n, 7, 5), classes(n, 7, 5, seed=2)), batch_size,
        order="sequential", carry=silence, clip_grad_norm=1.0,
    )  # fmt: skip


@case
def few_lanes(batch_size: int) -> Workload:
    """Fewer lanes than rows of most data: a rank loses its last lane in the short batch."""
    return workload(
        Letters, lambda: TensorDataset(classes(22, 7, 5), classes(22, 7, 5, seed=2)), 5,
        order="sequential", carry=silence,
    )  # fmt: skip


# Optimizers, schedules, clipping


def optimized(make: Callable[[Any], torch.optim.Optimizer], name: str, **options: Any) -> None:
    def made(batch_size: int) -> Workload:
        return workload(perceptron, tabular(batch_size, 10), batch_size, optimizer=make, **options)

    made.__name__ = name
    case(made)


optimized(lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), "adam")
optimized(lambda p: torch.optim.AdamW(p, lr=0.01), "adamw")
optimized(lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), "rmsprop")
optimized(lambda p: torch.optim.Adagrad(p, lr=0.05), "adagrad")
optimized(lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.2, momentum=0.9, maximize=False), "sgd_dampened")
optimized(momentum, "clipped", clip_grad_norm=0.05)
optimized(momentum, "one_cycle", schedule=lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, steps))
optimized(momentum, "step_schedule", schedule=lambda o, steps: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))


# Augmentation


def noisy(batch: Any, draws: Any) -> Any:
    keep = draws.bernoulli(0.8, 10)
    return batch.replace(inputs=batch.inputs * keep + 0.1 * draws.normal(10) + draws.uniform(1))


@case
def augmented(batch_size: int) -> Workload:
    return workload(perceptron, tabular(batch_size, 10), batch_size, augment=noisy)


class Restless(Dataset[Any]):
    """Draws in ``__getitem__``, as transforms do."""

    def __init__(self, n: int) -> None:
        self.x, self.y = numbers(n, 10), classes(n, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        import random

        import numpy as np

        return self.x[i] + torch.randn(10) * random.random() + float(np.random.rand()), self.y[i]


@case
def draws_in_the_data(batch_size: int) -> Workload:
    return workload(perceptron, lambda: Restless(rows(batch_size)), batch_size)


def shortened(samples: list[Any]) -> Any:
    """Inputs cut to the longest of the batch, as text is padded: the shards differ in width."""
    width = max(int(y) + 2 for _, y in samples)
    return torch.stack([x[:width] for x, _ in samples]), torch.stack([y for _, y in samples])


class AnyWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x[:, :2].sum(1, keepdim=True))


@case
def own_collate(batch_size: int) -> Workload:
    data = lambda: list(zip(numbers(rows(batch_size), 10), classes(rows(batch_size), 3), strict=True))  # noqa: E731
    return workload(AnyWidth, data, batch_size, collate=shortened)
