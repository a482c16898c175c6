"""Networks that not every target can take: max pools, attention, recurrent layers, and what depends on numbers or on
the number of examples.

    python hard_nets.py FOLDER TARGET NET...

exports some of them in a process of its own, with .venv/tpu on its path, and prints a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stablehlo_cases import Counting, Deciding, Selecting
from torch import Tensor, nn
from torch.nn import functional as F

COUNT = 12
"""The number of examples for calibration."""


@dataclass(frozen=True)
class Hard:
    """A network of three classes, and the inputs for so many examples."""

    net: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


class Last(nn.Module):
    """The last step of a recurrent layer, after an embedding."""

    def __init__(self, recurrent: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.embedding, self.recurrent, self.out = nn.Embedding(20, 6), recurrent, nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.recurrent(self.embedding(tokens))[0][:, -1])
        return found


class Cells(nn.Module):
    """A recurrent cell that is called a step at a time, as often as there are steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 5), x.new_zeros(len(x), 5))
        for step in x.unbind(1):
            state = self.cell(step, state)
        found: Tensor = self.out(state[0])
        return found


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return found


class Causal(nn.Module):
    """Attention by torch's function, each place to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.given(x).chunk(3, -1)
        found: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1])
        return found


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.block(x).mean(1))
        return found


class Part(nn.Module):
    """A layer with a linear one before and after it."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.first, self.odd, self.out = nn.Linear(6, 6), odd, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.odd(self.first(x)))
        return found


class Cutting(nn.Module):
    """What comes out has as many rows as there are positive sums."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0]


class Parity(nn.Module):
    """It asks for the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + 1 if len(x) % 2 else 1 + x)


class Centred(nn.Module):
    """It computes with all examples of a batch together."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x - x.mean(0, keepdim=True))


def pooled(pool: nn.Module, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(width, 3))


def images(count: int) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def tokens(count: int) -> Tensor:
    return torch.randint(0, 20, (count, 5), generator=torch.Generator().manual_seed(1))


def sequences(width: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, 5, width, generator=torch.Generator().manual_seed(1))


def rows(count: int) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


NETS: dict[str, Hard] = {
    "max pool": Hard(pooled(nn.MaxPool2d(2), 64), images),
    "overlapping max pool": Hard(pooled(nn.MaxPool2d(3, 2, 1, ceil_mode=True), 100), images),
    "global max pool": Hard(pooled(nn.AdaptiveMaxPool2d(1), 4), images),
    "attention": Hard(Attending, sequences(8)),
    "causal attention": Hard(Causal, sequences(8)),
    "transformer": Hard(Encoder, sequences(8)),
    "LSTM": Hard(lambda: Last(nn.LSTM(6, 8, batch_first=True), 8), tokens),
    "LSTM of both directions": Hard(
        lambda: Last(nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True, dropout=0.5), 16), tokens
    ),
    "GRU": Hard(lambda: Last(nn.GRU(6, 8, batch_first=True), 8), tokens),
    "LSTM cells": Hard(Cells, sequences(4)),
    "decides": Hard(lambda: Part(Deciding()), rows),
    "selects": Hard(lambda: Part(Selecting()), rows),
    "counts": Hard(lambda: Part(Counting()), rows),
    "cuts": Hard(lambda: Part(Cutting()), rows),
    "number of examples": Hard(lambda: Part(Parity()), rows),
    "all examples together": Hard(lambda: Part(Centred()), rows),
}


def exported(name: str, target: str, folder: Path) -> dict[str, Any]:
    """Export a network with examples and a loss. Returns what was verified, or why it was refused, and the files that
    are left."""
    from apportion.exporting.exporter import Data, export
    from apportion.exporting.target import Examples

    hard = NETS[name]
    torch.manual_seed(0)
    net, x = hard.net(), hard.inputs(COUNT)
    data = Data(calibration=Examples(x, torch.arange(COUNT) % 3), loss=F.cross_entropy)
    try:
        made = export(net, x[:4], folder / "net", target=target, data=data, check=[x[:7]])
    except ValueError as error:
        return {"refused": str(error), "left": sorted(file.name for file in folder.iterdir())}
    found = [(one.difference, one.limit, one.examples) for one in made.verifications]
    left = sorted(file.name for file in folder.iterdir())
    made.path.unlink()
    return {"verified": found, "left": left}


def main() -> None:
    """Export the networks that are named."""
    sys.path.append(str(Path(sys.prefix) / "tpu"))
    warnings.simplefilter("ignore")
    folder, target, *names = sys.argv[1:]
    for name in names:
        try:
            told = exported(name, target, Path(folder))
        except Exception:
            told = {"failed": traceback.format_exc()}
        print(json.dumps({"net": name, **told}), flush=True)


if __name__ == "__main__":
    main()
