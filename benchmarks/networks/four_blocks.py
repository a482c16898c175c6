"""Four equal blocks of a transformer, 512 wide, on made data: weights and Adam's slots are most of what a small batch
takes, activations most of what a large one does."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload

BLOCKS, WIDTH, LENGTH = 4, 512, 32


def network():
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS))
    )


def made_data():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, LENGTH, WIDTH, generator=generator) for _ in range(2))
    return TensorDataset(x, y)


workload = Workload(
    model=network,
    data=made_data,
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    batch_size=16,
)
