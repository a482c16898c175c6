"""What the scripts of this folder share: the ranks, rows, loaders and networks of an ordinary script for torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def begin():
    """Join the process group; returns the rank and the number of ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def rows(count=96):
    """A regression on made-up rows; x (count, 12), y (count, 1)."""
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.sin(x[:, :3]).sum(1, keepdim=True))


def loader_of(data, batch_size=16):
    """A shuffled loader of this rank's share of each batch, and its sampler."""
    sampler = DistributedSampler(data, shuffle=True)
    return DataLoader(data, batch_size=batch_size // dist.get_world_size(), sampler=sampler), sampler


def network():
    """Two layers."""
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))
