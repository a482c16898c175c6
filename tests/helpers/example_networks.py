"""The networks of examples/ as workloads of the tests: their own graphs, losses, updates and augmentations, on made-up
data, and with widths at which a step takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.core.address import load_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
examples: dict[str, Callable[[int], Workload]] = {}


def example(make: Callable[[int], Workload]) -> Callable[[int], Workload]:
    examples[make.__name__] = make
    return make


def like(name: str, data: Callable[[], Any], batch_size: int, **options: Any) -> Workload:
    """The example's workload on other data."""
    given: dict[str, Any] = {"data": data, "batch_size": batch_size, "evaluation": None, "epochs": None, **options}
    return replace(load_workload(str(EXAMPLES / f"{name}.py") + ":workload"), **{
        "steps": networks.STEPS, "precision": "float64", **given
    })  # fmt: skip


def narrow(model: nn.Module, widths: Mapping[int, int]) -> nn.Module:
    """The same layers with fewer units: every width that is listed becomes another."""
    for name, layer in list(model.named_modules()):
        made: nn.Module
        if isinstance(layer, nn.Conv2d):
            made = nn.Conv2d(
                widths.get(layer.in_channels, layer.in_channels), widths.get(layer.out_channels, layer.out_channels),
                layer.kernel_size, layer.stride, layer.padding,  # type: ignore[arg-type]
            )  # fmt: skip
        elif isinstance(layer, nn.Linear):
            made = nn.Linear(*(widths.get(n, n) for n in (layer.in_features, layer.out_features)))
        elif isinstance(layer, nn.EmbeddingBag):
            sizes = [widths.get(n, n) for n in (layer.num_embeddings, layer.embedding_dim)]
            made = nn.EmbeddingBag(*sizes, mode=layer.mode, sparse=layer.sparse)
        elif isinstance(layer, nn.Embedding):
            made = nn.Embedding(layer.num_embeddings, widths.get(layer.embedding_dim, layer.embedding_dim))
        elif isinstance(layer, nn.LSTM):
            sizes = [widths.get(n, n) for n in (layer.input_size, layer.hidden_size)]
            made = nn.LSTM(*sizes, layer.num_layers, batch_first=layer.batch_first)
        else:
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made)
    return model


IMAGES = 5
"""A batch, at most."""


def pixels(name: str, batch_size: int) -> Workload:
    """On images of 0 to 255, as CIFAR-10's."""
    batch_size = min(batch_size, IMAGES)
    n = networks.rows(batch_size)
    images = torch.randint(0, 256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return like(name, lambda: TensorDataset(images.double(), networks.classes(n, 10)), batch_size)


@example
def cifar10(batch_size: int) -> Workload:
    made = pixels("cifar10", batch_size)
    whole = made.model

    def model() -> nn.Module:
        small = narrow(whole(), {64: 8, 6 * 6 * 64: 6 * 6 * 8, 384: 48, 192: 24})
        small.norm1, small.norm2 = (type(small.norm1)(8) for _ in range(2))
        return small

    return replace(made, model=model)


@example
def resnet20_cifar10(batch_size: int) -> Workload:
    """With one block a stage."""
    made = pixels("resnet20_cifar10", batch_size)
    whole = made.model
    return replace(made, model=lambda: type(whole())(blocks=1))


@example
def alexnet_cifar10(batch_size: int) -> Workload:
    """Without dropout, which no two ranks draw alike."""
    made = pixels("alexnet_cifar10", batch_size)
    alexnet: Any = made.model
    widths = {64: 4, 192: 6, 384: 8, 256: 5, 4096: 5 * 4 * 4}
    return replace(made, model=lambda: narrow(alexnet(dropout=0.0), widths))


def letters(name: str, layers: int, batch_size: int) -> Workload:
    def silence(rows: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(layers, rows, 6), torch.zeros(layers, rows, 6)

    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 128, 11), networks.classes(n, 128, 11, seed=2))  # noqa: E731
    made = like(name, data, batch_size, carry=silence)
    whole = made.model
    return replace(made, model=lambda: narrow(whole(), {256: 6}))


@example
def char_rnn(batch_size: int) -> Workload:
    return letters("char_rnn", 1, batch_size)


@example
def char_lstm(batch_size: int) -> Workload:
    return letters("char_lstm", 4, batch_size)


@example
def transformer(batch_size: int) -> Workload:
    batch_size = min(batch_size, 5)
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 128, 128), networks.classes(n, 128, 128, seed=2))  # noqa: E731
    made = like("transformer", data, batch_size)
    gpt: Any = made.model
    return replace(made, model=lambda: gpt(width=8, heads=4, blocks=2))


@example
def digits(batch_size: int) -> Workload:
    made = like("digits", networks.tabular(batch_size, 64, many=10), batch_size)
    whole = made.model
    return replace(made, model=lambda: narrow(whole(), {256: 24}))


@example
def contrastive(batch_size: int) -> Workload:
    made = like("contrastive", networks.tabular(batch_size, 64, last=2), batch_size)
    whole = made.model
    return replace(made, model=lambda: narrow(whole(), {256: 24}))


@example
def embedding_bag(batch_size: int) -> Workload:
    n = networks.rows(batch_size)
    data = lambda: TensorDataset(networks.classes(n, 300, 40), networks.classes(n, 20))  # noqa: E731
    made = like("embedding_bag", data, batch_size)
    whole = made.model
    return replace(made, model=lambda: narrow(whole(), {20_000: 300}))


@example
def gan(batch_size: int) -> Workload:
    made = like("gan", networks.tabular(batch_size, 64, last=2), batch_size)
    whole = made.model
    return replace(made, model=lambda: narrow(whole(), {256: 16, 128: 12}))


@example
def lbfgs(batch_size: int) -> Workload:
    return like("lbfgs", networks.tabular(batch_size, 64, many=10), batch_size)
