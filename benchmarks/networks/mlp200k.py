"""A small network of fully connected layers: 3072-64-10, 197 thousand parameters, on made data."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload


def network():
    return nn.Sequential(nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))


def made_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 3072, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (2048,), generator=generator))


workload = Workload(
    model=network,
    data=made_data,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    batch_size=128,
)
