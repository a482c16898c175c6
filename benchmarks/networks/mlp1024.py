"""A network of MNIST's size, 784-1024-1024-10, 1.9 million parameters, on made data."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload


def network():
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def made_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 784, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (4096,), generator=generator))


workload = Workload(
    model=network,
    data=made_data,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    batch_size=128,
)
