"""Sliced layers on real processes: the outputs, the gradients and the pieces are those of the whole network."""

from __future__ import annotations

import copy
import functools
import itertools
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

from apportion import Workload
from apportion.comm.world import World
from apportion.core import tree
from apportion.errors import WorkerFailed
from apportion.parallel.partition.tensor_shards import ShardLayout, TensorShard
from apportion.parallel.tensor.cross_entropy import cross_entropy_of, sliced_cross_entropy
from apportion.parallel.tensor.patterns import Pair
from apportion.parallel.tensor.sharding_plan import ShardingPlan, TensorParallelModel, plan
from apportion.parallel.tensor.slicing import shares

pytestmark = pytest.mark.processes

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


def differences(world: World, makes: list[Make], min_width: int) -> list[tuple[float, ShardingPlan, dict[str, Any]]]:
    """The largest difference from the whole network, in outputs and gradients, training and evaluating; how it was
    sliced; and the pieces."""
    found = []
    for make in makes:
        torch.manual_seed(0)
        whole, inputs = make()
        whole = whole.double()
        sliced_model = copy.deepcopy(whole)
        chosen = plan(sliced_model, inputs, a_workload(), min_width=min_width)
        sliced = TensorParallelModel(sliced_model, chosen, world.group(), a_workload())
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
            piece = sliced.pieces.get(name, TensorShard(tuple(p.shape)))
            assert gradients[name].shape == piece.local_shape, name
            pairs.append((None if p.grad is None else piece.slice_of(p.grad), gradients[name].grad))
            worst = max(worst, apart(piece.slice_of(p.detach()), gradients[name].detach()))
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


def prove(makes: list[Make], ranks: int, min_width: int = 1) -> list[ShardingPlan]:
    """Every network is the same in slices; how each was sliced."""
    answers = on_ranks(differences, ranks, makes, min_width)
    for number in range(len(makes)):
        assert max(a[number][0] for a in answers) <= EXACT, number
        layout = ShardLayout.from_plain([a[number][2] for a in answers])
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
    for a, b in itertools.pairwise(widths):
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
        self.embed, self.mix, self.out = (
            nn.Embedding(many, 4, padding_idx=many // 2),
            nn.Linear(4, 4),
            nn.Linear(4, many),
        )
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
    TensorParallelModel(model, chosen, world.group(), a_workload()).model(torch.tensor([word]))


@pytest.mark.parametrize("word", [-1, 9])
def test_a_word_that_no_rank_has_is_an_error(word: int) -> None:
    with pytest.raises(WorkerFailed, match="index out of range"):
        on_ranks(look_up, 2, word)


# Attention


class Attends(nn.Module):
    """Every way to call it."""

    def __init__(self, heads: int, *, weights: str = "", masks: str = "", **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(heads * 2, heads, **options)
        self.weights, self.masks, self.heads = weights, masks, heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        long = (1 if self.attention.batch_first else 0) if query.dim() == 3 else 0
        batch = () if query.dim() == 2 else (query.shape[1 - long],)
        length, source = query.shape[long], key.shape[long]
        options: dict[str, Any] = {"need_weights": bool(self.weights), "average_attn_weights": self.weights == "mean"}
        if "causal" in self.masks:
            options["attn_mask"] = torch.ones(length, source, dtype=torch.bool).triu(1)
        if "float" in self.masks:
            options["attn_mask"] = numbers(length, source, seed=4)
        if "heads" in self.masks:
            options["attn_mask"] = numbers(batch[0] * self.heads, length, source, seed=5)
        if "padding" in self.masks:
            options["key_padding_mask"] = (torch.arange(source) == source - 1).expand(*batch, source)
        return [t for t in self.attention(query, key, value, **options) if t is not None]


class Encoder(nn.Module):
    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(heads * 2, heads, 5, dropout=0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        return self.encoder(x, src_key_padding_mask=padding)


def attention_cases() -> list[Make]:
    def made(heads: int, shapes: list[tuple[int, ...]], *, one: bool = False, **options: Any) -> Make:
        given = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
        inputs = (given[0],) * 3 if one else tuple(given)
        return lambda: (Attends(heads, **options), inputs)

    x3, x2 = [(4, 3, 6)] * 3, [(4, 6)] * 3
    return [
        made(3, x3),
        made(3, x3, one=True),
        made(3, x3, one=True, batch_first=True, weights="mean", masks="causal"),
        made(3, x3, batch_first=True, weights="each", masks="padding float"),
        made(3, x3, masks="padding heads"),
        made(3, x3, bias=False, masks="causal padding", weights="mean"),
        made(3, [(4, 3, 6), (5, 3, 2), (5, 3, 7)], kdim=2, vdim=7, weights="each"),
        made(3, x2, weights="mean"),
        made(1, [(4, 3, 2)] * 3, weights="each"),
        made(3, x3, add_zero_attn=True),
        made(3, x3, add_bias_kv=True),
        lambda: (Encoder(3), numbers(2, 4, 6)),
        lambda: (Encoder(2, activation=nn.GELU(), norm_first=True, bias=False), numbers(2, 4, 4)),
        lambda: (Encoder(1, activation=lambda x: torch.softmax(x, -1)), numbers(2, 4, 2)),
        lambda: (
            nn.TransformerDecoderLayer(6, 3, 5, dropout=0.0, batch_first=True),
            (numbers(2, 4, 6), numbers(2, 3, 6, seed=1)),
        ),
    ]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_attention_by_heads_is_the_whole_attention(ranks: int) -> None:
    plans = prove(attention_cases(), ranks)
    assert [len(found.attention) for found in plans] == [1] * 9 + [0, 0, 2, 2, 2, 2]
    assert [len(found.pairs) for found in plans[11:]] == [2, 2, 0, 1]


# Recurrent layers


class Carries(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], hidden: int, **options: Any) -> None:
        super().__init__()
        self.layer = kind(3, hidden, **options)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        outputs, state = self.layer(x, (h, c) if isinstance(self.layer, nn.LSTM) else h)
        return [outputs, *tree.tensors(state)]


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Any:
        lengths = torch.tensor([x.shape[0], *[1] * (x.shape[1] - 1)])
        return self.layer(pack_padded_sequence(x, lengths))[0].data


def recurrent_cases() -> list[Make]:
    x = numbers(5, 2, 3)

    def carried(kind: type[nn.RNNBase], hidden: int, layers: int, **options: Any) -> Make:
        h, c = numbers(layers, 2, hidden, seed=1), numbers(layers, 2, hidden, seed=2)
        return lambda: (Carries(kind, hidden, **options), (x, h, c))

    return [
        lambda: (nn.LSTM(3, 5), x),
        lambda: (nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True), x),
        lambda: (nn.GRU(3, 5, num_layers=2, bias=False), x),
        lambda: (nn.GRU(3, 4, bidirectional=True), x[:, 0]),
        lambda: (nn.RNN(3, 4, nonlinearity="relu"), x),
        lambda: (nn.RNN(3, 4, num_layers=2), x),
        carried(nn.LSTM, 5, 4, num_layers=2, bidirectional=True),
        carried(nn.GRU, 3, 2, num_layers=2, bias=False),
        lambda: (nn.LSTM(3, 5, proj_size=2), x),
        lambda: (Packs(), x),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_recurrent_layers_by_units_are_the_whole_layers(ranks: int) -> None:
    plans = prove(recurrent_cases(), ranks)
    assert [len(found.recurrent) for found in plans] == [1] * 8 + [0, 0]


# Cross-entropy

Options = dict[str, Any]


def losses(world: World, cases: list[tuple[Tensor, Tensor, Options]]) -> list[float]:
    """The largest difference of loss and gradient from torch's."""
    group, found = world.group(), []
    for logits, targets, options in cases:
        sizes = [len(share) for share in shares(logits.shape[1], group.size)]
        start = sum(sizes[: group.rank])
        own = slice(start, start + sizes[group.rank])
        whole, part = logits.clone().requires_grad_(), logits[:, own].clone().requires_grad_()
        expected = F.cross_entropy(whole, targets, **options)
        known = cross_entropy_of(functools.partial(F.cross_entropy, **options))
        assert known is not None
        loss = sliced_cross_entropy(part, targets, group, sizes, known)
        (expected * 3).backward()
        (loss * 3).backward()
        assert whole.grad is not None
        both = torch.isnan(expected) and torch.isnan(loss)
        assert loss.dtype == expected.dtype
        found.append(max(0.0 if both else apart(expected, loss), apart(whole.grad[:, own], part.grad)))
    return found


def loss_cases() -> list[tuple[Tensor, Tensor, Options]]:
    z, y, weight = numbers(6, 7), words(7, 6), numbers(7).abs()
    ignored = y.masked_fill(torch.arange(6) % 2 == 0, -100)
    lost = z.masked_fill(torch.arange(7) == 6, float("-inf"))
    return [
        (z, y, {}),
        (z * 1000, y, {}),
        (z, ignored, {}),
        (z, torch.full_like(y, -100), {}),
        (z, y, {"ignore_index": 2}),
        (z, y, {"weight": weight}),
        (z, ignored, {"weight": weight, "label_smoothing": 0.3}),
        (z, y, {"label_smoothing": 0.1, "ignore_index": 1}),
        (lost, y.clamp(max=5), {}),
        (numbers(3, 7, 2, 4), words(7, 3, 2, 4), {"label_smoothing": 0.2}),
        (z, numbers(6, 7, seed=3).softmax(1), {}),
        (z, numbers(6, 7, seed=3).softmax(1), {"weight": weight, "label_smoothing": 0.3}),
        (numbers(3, 7, 4), numbers(3, 7, 4, seed=3).softmax(1), {"label_smoothing": 0.3}),
        (numbers(4, 2), words(2, 4), {"weight": weight[:2]}),
        (numbers(4, 1), words(1, 4), {}),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cross_entropy_of_logits_in_slices_is_torchs(ranks: int) -> None:
    for found in on_ranks(losses, ranks, loss_cases()):
        assert max(found) <= EXACT, found


def test_the_loss_is_known_by_what_it_is_and_not_by_what_it_gives() -> None:
    weight = torch.ones(3)
    for loss in (F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss(weight)):
        assert cross_entropy_of(loss) is not None
    for loss in (
        lambda outputs, targets: F.cross_entropy(outputs, targets),
        functools.partial(F.cross_entropy, reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        F.mse_loss,
        None,
    ):
        assert cross_entropy_of(loss) is None


def outside(world: World, target: int) -> None:
    sliced_cross_entropy(
        numbers(1, 2), torch.tensor([target]), world.group(), [2, 2], cross_entropy_of(F.cross_entropy)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [-1, 4])
def test_a_target_that_is_no_class_is_an_error(target: int) -> None:
    with pytest.raises(WorkerFailed, match=f"Target {target} is out of bounds"):
        on_ranks(outside, 2, target)
