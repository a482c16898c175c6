"""A network that is mostly gradient: 3072-2048-2048-10, 10.5 million parameters, on made data."""

from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload


def network():
    return nn.Sequential(nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


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

adam = replace(workload, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001))
