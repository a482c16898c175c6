"""Sliced layers on real processes: the outputs, the gradients and the pieces are those of the whole network."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from apportion import Workload, tree
from apportion.errors import WorkerFailed
from apportion.parallel.pieces import Layout, Piece
from apportion.parallel.sliced import Plan, SlicedModel, plan
from apportion.parallel.sliced_graph import Pair
from apportion.parallel.sliced_loss import cross_entropy_of, sliced_cross_entropy
from apportion.parallel.slices import shares
from apportion.world import World

EXACT = 1e-10
Make = Callable[[], tuple[nn.Module, Any]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(many: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, many, shape, generator=torch.Generator().manual_seed(seed))


def a_workload(model: Any = nn.Identity, **options: Any) -> Workload:
    given: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **options}
    return Workload(model=model, data=list, batch_size=1, precision="float64", **given)


def total(outputs: Any) -> Tensor:
    """A loss that depends on every number differently."""
    sums = [(t * numbers(*t.shape, seed=i)).sum() for i, t in enumerate(tree.tensors(outputs))]
    return torch.stack(sums).sum()


def differences(world: World, makes: list[Make], min_width: int) -> list[tuple[float, Plan, dict[str, Any]]]:
    """The largest difference from the whole network, in outputs and gradients, training and evaluating; how it was
    sliced; and the pieces."""
    found = []
    for make in makes:
        torch.manual_seed(0)
        whole, inputs = make()
        whole = whole.double()
        sliced_model = copy.deepcopy(whole)
        chosen = plan(sliced_model, inputs, a_workload(), min_width=min_width)
        sliced = SlicedModel(sliced_model, chosen, world.group(), a_workload())
        given = [tree.map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()), inputs) for _ in range(2)]
        worst = 0.0
        outputs = []
        for model, x in zip((whole, sliced.model), given, strict=True):
            outputs.append(tree.tensors(tree.call(model, x)))
            total(outputs[-1]).backward()
        pairs = list(zip(*outputs, strict=True))
        pairs += [(a.grad, b.grad) for a, b in zip(*map(tree.tensors, given), strict=True)]
        gradients = dict(sliced.model.named_parameters())
        for name, p in whole.named_parameters():
            piece = sliced.pieces.get(name, Piece(tuple(p.shape)))
            assert gradients[name].shape == piece.held, name
            pairs.append((None if p.grad is None else piece.of(p.grad), gradients[name].grad))
            worst = max(worst, apart(piece.of(p.detach()), gradients[name].detach()))
        with torch.no_grad():
            both = [tree.tensors(tree.call(model.eval(), x)) for model, x in ((whole, inputs), (sliced.model, inputs))]
        pairs += zip(*both, strict=True)
        worst = max([worst, *(apart(a, b) for a, b in pairs)])
        found.append((worst, chosen, {name: p.plain() for name, p in sliced.pieces.items()}))
    return found


def apart(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        there = a if b is None else b
        assert there is None or not there.numel() or not there.detach().any()
        return 0.0
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def prove(makes: list[Make], ranks: int, min_width: int = 1) -> list[Plan]:
    """Every network is the same in slices; how each was sliced."""
    answers = on_ranks(differences, ranks, makes, min_width)
    for number in range(len(makes)):
        assert max(a[number][0] for a in answers) <= EXACT, number
        layout = Layout.of([a[number][2] for a in answers])
        for name in layout.holders:
            layout.owners(name)  # asserts that the pieces are the whole
    return [chosen for _, chosen, _ in answers[0]]


# Linear layers


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(5, width), nn.Linear(5, width, bias=False), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) * 0.5 + 1)


class Broadcast(nn.Module):
    """One unit that scales the others is on one rank alone: no pair."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(5, 1), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Skipped(nn.Module):
    """The hidden units are used twice: no pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h) + h


class Normalised(nn.Module):
    """The norm looks at all hidden units: no pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


class Repeated(nn.Module):
    """The same pair several times over."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down(torch.tanh(self.up(x)))
        return x


class Undecided(nn.Module):
    """Its flow depends on the data, so it has no graph: layers are sliced one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.relu(h)) if bool(h.sum() > 100) else self.down(torch.tanh(h))


class Whole(nn.Module):
    """Uses one weight outside of its layer, and another for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(7, 5), nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.down(torch.relu(self.up(self.embed(tokens))))
        return F.linear(h, self.embed.weight), self.up.weight.square().sum().reshape(1)


class TrainsOtherwise(nn.Module):
    """In evaluation the hidden units are wanted too: a pair only where it trains is none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.up(x))
        return self.down(h) if self.training else (self.down(h), h)


class OneDropout(nn.Module):
    """The dropout in between drops whole tensors elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(5, 6), nn.Linear(6, 4), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(torch.relu(self.up(x)))))


def sequential(*widths: int, bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(a, b, bias=bias), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def linear_cases() -> list[Make]:
    x, tokens = numbers(3, 5), words(7, 2, 3)
    return [
        lambda: (sequential(5, 7, 4), x),
        lambda: (sequential(5, 2, 4), x),
        lambda: (sequential(5, 6, 7, 4, 3, bias=False), x),
        lambda: (Gated(7), numbers(2, 3, 5)),
        lambda: (Broadcast(), x),
        lambda: (Skipped(), x),
        lambda: (Normalised(), x),
        lambda: (Repeated(), x),
        lambda: (Undecided(), x),
        lambda: (Whole(), tokens),
        lambda: (TrainsOtherwise(), x),
        lambda: (OneDropout(), x),
        lambda: (nn.Linear(5, 2), x),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_linear_layers_in_slices_are_the_whole_layers(ranks: int) -> None:
    plans = prove(linear_cases(), ranks)
    pairs = [[(pair.columns, pair.row) for pair in found.pairs] for found in plans]
    assert pairs == [
        [(("0",), "2")], [(("0",), "2")], [(("0",), "2"), (("4",), "6")], [(("gate", "up"), "down")],
        [], [], [], [(("up",), "down")], [], [], [], [], [],
    ]  # fmt: skip
    assert [found.alone for found in plans] == [
        (), (), (), (), ("gate", "up", "down"), ("up", "down"), ("up", "down"), (), ("up", "down"), ("down",),
        ("up", "down"), ("up", "down"), ("",),
    ]  # fmt: skip
    assert all(not found.embeddings for found in plans)


@settings(max_examples=4, deadline=None)
@given(
    ranks=st.integers(2, 4),
    widths=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=3, max_size=6),
    bias=st.booleans(),
)
def test_any_widths_are_sliced_evenly_or_not(ranks: int, widths: list[list[int]], bias: bool) -> None:
    prove([(lambda w=w: (sequential(*w, bias=bias), numbers(3, w[0]))) for w in widths], ranks)  # type: ignore[misc]


# Embeddings


class Tied(nn.Module):
    def __init__(self, many: int, *, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(many, 4, padding_idx=many // 2), nn.Linear(4, 4), nn.Linear(4, many)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


def embedding_cases() -> list[Make]:
    tokens = words(9, 2, 5)
    return [
        lambda: (nn.Embedding(9, 4), tokens),
        lambda: (nn.Embedding(9, 4, padding_idx=3), tokens),
        lambda: (nn.Embedding(2, 3), tokens % 2),
        lambda: (nn.Embedding(9, 4, scale_grad_by_freq=True), tokens),
        lambda: (nn.Embedding(9, 4, max_norm=0.5), tokens),
        lambda: (Tied(9), tokens),
        lambda: (Tied(9, tied=False), tokens),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_embeddings_by_vocabulary_are_the_whole_embeddings(ranks: int) -> None:
    plans = prove(embedding_cases(), ranks)
    assert [p.embeddings for p in plans] == [("",), ("",), ("",), (), (), ("embed",), ("embed",)]
    assert [p.pairs for p in plans] == [()] * 6 + [(Pair(("mix",), "out"),)]
    assert plans[5].alone == ("mix", "out")


def look_up(world: World, word: int) -> None:
    model = nn.Embedding(9, 4)
    chosen = plan(model, torch.zeros(1, dtype=torch.int64), a_workload(), min_width=1)
    SlicedModel(model, chosen, world.group(), a_workload()).model(torch.tensor([word]))


@pytest.mark.parametrize("word", [-1, 9])
def test_a_word_that_no_rank_has_is_an_error(word: int) -> None:
    with pytest.raises(WorkerFailed, match="index out of range"):
        on_ranks(look_up, 2, word)
