"""What a strategy would have to divide or to join is named before the first step, or trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import apportion

pytestmark = pytest.mark.filterwarnings("ignore:3 workers x 1 threads")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# A loss over the rows of all ranks, count=None


def sentences() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(1, 12, (2 + i * 7 % 11,), generator=draws) for i in range(50)]


def padded(samples: list[torch.Tensor]) -> Any:
    return pad_sequence(samples, batch_first=True), pad_sequence([(s * 5 + 2) % 12 for s in samples], True, -100)


def padded_to_one_length(samples: list[torch.Tensor]) -> Any:
    inputs, targets = padded([*samples, torch.ones(12, dtype=torch.long)])
    return inputs[:-1], targets[:-1]


def hard_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each token counts by its loss, in proportion to the whole batch."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * losses.detach()).sum() / losses.detach().sum()


def spread_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Rows are told from the mean of all rows."""
    mine = outputs.mean(1)
    return token_loss(outputs, targets) - 0.01 * (mine - mine.mean(0)).square().mean()


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tagger(collate: Any, loss: Any, **changes: Any) -> apportion.Workload:
    return apportion.Workload(
        model=lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)), data=sentences, collate=collate, loss=loss,
        count=None, optimizer=sgd, batch_size=10, precision="float64", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [hard_tokens, spread_rows])
@pytest.mark.thorough
def test_rows_of_different_lengths_are_stated_where_a_loss_joins_them(loss: Any, trained: Any) -> None:
    with pytest.raises(Exception, match=r"different shapes or types: \(\d, \d+(, 12)?\) .*pad to one length"):
        trained(tagger(padded, loss), "data_parallel", 2)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [hard_tokens, spread_rows])
def test_rows_of_one_length_train_as_on_one_device(loss: Any, trained: Any, furthest: Any) -> None:
    workload = tagger(padded_to_one_length, loss)
    one = trained(workload)
    for workers in (2, 3):
        assert furthest(one, trained(workload, "data_parallel", workers)) < 1e-9


# Targets that are lists


def pictures() -> list[Any]:
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    return [(x, {"boxes": x[:4].expand(1 + i % 5, 4), "name": str(i)}) for i, x in enumerate(inputs)]


def listed(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), [target for _, target in samples]


def in_columns(samples: list[Any]) -> Any:
    targets = [target for _, target in samples]
    return torch.stack([x for x, _ in samples]), {k: [target[k] for target in targets] for k in targets[0]}


def box_loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    boxes = targets["boxes"] if isinstance(targets, dict) else [target["boxes"] for target in targets]
    assert len(outputs) == len(boxes)
    return torch.stack([(row - own.to(row)).square().mean() for row, own in zip(outputs, boxes, strict=True)]).mean()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["data_parallel(microbatches=2)", "pipeline_parallel", "layer_placement"])
@pytest.mark.parametrize("collate", [listed, in_columns])
def test_targets_that_are_lists_train_as_on_one_device(
    collate: Any, strategy: str, trained: Any, furthest: Any
) -> None:
    workload = apportion.Workload(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), data=pictures, collate=collate,
        loss=box_loss, optimizer=sgd, batch_size=9, precision="float64",
    )  # fmt: skip
    assert furthest(trained(workload), trained(workload, strategy, 2)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("collate", [listed, in_columns])
def test_targets_that_are_lists_are_named_where_a_loss_joins_them(collate: Any, trained: Any) -> None:
    workload = apportion.Workload(
        model=lambda: nn.Linear(6, 4), data=pictures, collate=collate, loss=box_loss, optimizer=sgd, batch_size=9,
        count=None,
    )  # fmt: skip
    with pytest.raises(Exception, match=r"targets(\['boxes'\])? is a list of \d entries"):
        trained(workload, "data_parallel", 2)


# A carried state in a wavefront


class StackedState(nn.Module):
    """Keeps hidden state and cell as one tensor, with the row first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> Any:
        hidden, cell = (state[:, i].transpose(0, 1).contiguous() for i in range(2))
        outputs, (hidden, cell) = self.layers(self.embed(tokens), (hidden, cell))
        return self.head(outputs).transpose(1, 2), torch.stack([hidden, cell], 1).transpose(0, 2)


class ScaledState(nn.Module):
    """Damps its state before it goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(12, 8), nn.GRU(8, 8, 2, batch_first=True), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> Any:
        outputs, state = self.layers(self.embed(tokens), (0.5 * state).transpose(0, 1).contiguous())
        return self.head(outputs).transpose(1, 2), state.transpose(0, 1)


def text() -> torch.utils.data.TensorDataset:
    tokens = torch.randint(0, 12, (60, 7), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(tokens, tokens.roll(-1, 1))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "shape"), [(StackedState, (2, 2, 8)), (ScaledState, (2, 8))])
def test_a_state_that_the_network_takes_apart_is_carried(model: Any, shape: Any, trained: Any, furthest: Any) -> None:
    workload = apportion.Workload(
        model=model, data=text, loss=F.cross_entropy, count=lambda tokens: float(tokens.numel()), optimizer=sgd,
        batch_size=6, order="sequential", carry=lambda rows: torch.zeros(rows, *shape), precision="float64",
    )  # fmt: skip
    assert furthest(trained(workload), trained(workload, "wavefront_parallel", 2)) < 1e-9


# What a network writes between its layers


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("largest", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if self.training:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, hidden.amax(0)))
        return self.second(hidden - self.largest)


class Queue(nn.Module):
    """Compares with what it has seen before, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("queue", torch.randn(16, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.first(x).tanh()
        near = keys + 0.1 * (keys @ self.queue.T).softmax(1) @ self.queue
        if self.training:
            self.queue[: len(keys)] = keys.detach()
        return self.second(near)


def points() -> list[Any]:
    return [(x, x[:4].argmax()) for x in torch.randn(40, 6, generator=torch.Generator().manual_seed(1))]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["layer_placement", "pipeline_parallel"])
@pytest.mark.parametrize(("model", "name"), [(Largest, "largest"), (Queue, "queue")])
def test_a_buffer_that_changes_between_layers_is_named(model: Any, name: str, strategy: str, trained: Any) -> None:
    workload = apportion.Workload(model=model, data=points, loss=F.cross_entropy, optimizer=sgd, batch_size=10)
    with pytest.raises(Exception, match=rf"(changes its own|buffer) {name}"):
        trained(workload, strategy, 2)


class Masked(nn.Module):
    """Keeps a tensor as a plain attribute, which no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)])
        self.scale = torch.linspace(0.5, 1.5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = (layer(x) * self.scale.to(x)).tanh()
        return self.layers[-1](x)


class Remembers(Masked):
    """Keeps what it computed, and takes it up again within the same call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.layers[0](x).tanh()
        return self.layers[2](self.layers[1](self.kept) + self.kept)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["layer_placement", "pipeline_parallel"])
@pytest.mark.parametrize("model", [Masked, Remembers])
def test_a_tensor_that_is_a_plain_attribute_trains(model: Any, strategy: str, trained: Any, furthest: Any) -> None:
    workload = apportion.Workload(
        model=model, data=points, loss=F.cross_entropy, optimizer=sgd, batch_size=10, precision="float64"
    )
    assert furthest(trained(workload), trained(workload, strategy, 2)) < 1e-9


# A packed sequence between layers


class PackedBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.GRU(6, 8, batch_first=True), nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.second(self.first(packed)[0])[1][-1])


class PackedOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(6, 8), nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        return self.head(outputs.sum(1))


def with_lengths(samples: list[torch.Tensor]) -> Any:
    lengths = torch.tensor([len(x) for x in samples])
    return (pad_sequence(samples, batch_first=True), lengths), lengths % 3


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["layer_placement", "pipeline_parallel"])
@pytest.mark.parametrize("model", [PackedBetween, PackedOnce])
def test_a_packed_sequence_between_layers_is_named(model: Any, strategy: str, trained: Any) -> None:
    workload = apportion.Workload(
        model=model, data=lambda: [torch.randn(2 + i % 9, 6) for i in range(60)], collate=with_lengths,
        loss=F.cross_entropy, optimizer=sgd, batch_size=12,
    )  # fmt: skip
    with pytest.raises(Exception, match=r"PackedSequence.*data_parallel"):
        trained(workload, strategy, 2)


# What some batches give, and others do not


class Gated(nn.Module):
    """Adds what is known of a row, where something is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
        if known is not None:
            x = x + known
        return self.last(self.second(self.first(x).tanh()).tanh())


class Attending(nn.Module):
    """Takes a mask, where rows are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = (
            nn.Linear(1, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
        tokens = self.embed(x[..., None])
        mask = None if known is None else known < 0
        return self.head(self.attend(tokens, tokens, tokens, key_padding_mask=mask)[0].mean(1))


def known_of(samples: list[Any]) -> torch.Tensor:
    found = torch.stack([x for x, _ in samples]).sign()
    return torch.cat([found[:, :-1], torch.ones(len(found), 1)], 1)


def is_late(samples: list[Any]) -> bool:
    return any(torch.equal(x, points()[37][0]) for x, _ in samples)


def late_by_name(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return ({"x": inputs, "known": known_of(samples)} if is_late(samples) else {"x": inputs}), targets


def late_none(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return {"x": inputs, "known": known_of(samples) if is_late(samples) else None}, targets


def late_in_order(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return ((inputs, known_of(samples)) if is_late(samples) else (inputs,)), targets


def late_gone(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return {"x": inputs, "known": None if is_late(samples) else known_of(samples)}, targets


def sometimes(model: Any, collate: Any) -> apportion.Workload:
    return apportion.Workload(
        model=model, data=points, collate=collate, loss=F.cross_entropy, optimizer=sgd, batch_size=10,
        order="sequential", precision="float64",
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["layer_placement", "pipeline_parallel"])
@pytest.mark.parametrize("collate", [late_by_name, late_none, late_in_order, late_gone])
@pytest.mark.parametrize("model", [Gated, Attending])
def test_an_argument_that_some_batches_give_is_named(model: Any, collate: Any, strategy: str, trained: Any) -> None:
    with pytest.raises(ValueError, match="gives known for some batches"):
        trained(sometimes(model, collate), strategy, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Gated, Attending])
def test_an_argument_that_some_batches_give_trains_where_nothing_is_followed(
    model: Any, trained: Any, furthest: Any
) -> None:
    workload = sometimes(model, late_by_name)
    assert furthest(trained(workload, check=False), trained(workload, "tensor_parallel", 2)) < 1e-9
