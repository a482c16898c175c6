"""Eight equal layers, 1024 wide, on made data: what cuts into stages of the same work."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload

LAYERS, WIDTH = 8, 1024


def network():
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def made_data():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1024, WIDTH, generator=generator) for _ in range(2))
    return TensorDataset(x, y)


workload = Workload(
    model=network,
    data=made_data,
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    batch_size=256,
)
