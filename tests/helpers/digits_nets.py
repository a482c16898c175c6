"""Small networks that are trained on scikit-learn's digits within seconds, and the data that they are judged by."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion.exporting.exporter import Data
from apportion.exporting.target import Examples

HELD_OUT = 500


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The images, 8 x 8 numbers from 0 to 1, and their digits, in an order of a fixed seed."""
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 10),
    )  # fmt: skip


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU6(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(12, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """A residual block, and two linear layers without an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 12), nn.Linear(12, 12)
        self.third, self.out = nn.Linear(12, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        found: Tensor = self.out(self.third((self.second(x) + x).relu()))
        return found


@cache
def trained(make: type[nn.Module]) -> nn.Module:
    """The network after 15 epochs; the same one each time."""
    inputs, targets = digits()
    inputs, targets = inputs[HELD_OUT:], targets[HELD_OUT:]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for _ in range(15):
            for rows in torch.randperm(len(inputs)).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs[rows]), targets[rows]).backward()
                optimizer.step()
    return net.eval()


def data() -> Data:
    """The examples that choices are made on, and the 500 that are held out of them."""
    inputs, targets = digits()
    return Data(
        calibration=Examples(inputs[HELD_OUT:][:1024], targets[HELD_OUT:][:1024]),
        training=TensorDataset(inputs[HELD_OUT:], targets[HELD_OUT:]),
        loss=nn.functional.cross_entropy,
        held_out=Examples(inputs[:HELD_OUT], targets[:HELD_OUT]),
    )
