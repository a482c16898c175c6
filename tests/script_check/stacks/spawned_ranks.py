"""A script that starts its ranks by itself."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def train(rank, world_size, epochs):
    setup(rank, world_size)
    torch.manual_seed(0)
    m = DDP(nn.Linear(4, 1))
    o = torch.optim.SGD(m.parameters(), 0.1)
    x = torch.randn(32, 4)
    ds = TensorDataset(x, x.sum(1, keepdim=True))
    s = DistributedSampler(ds, num_replicas=world_size, rank=rank)
    for e in range(epochs):
        s.set_epoch(e)
        for a, b in DataLoader(ds, 4, sampler=s):
            o.zero_grad()
            nn.functional.mse_loss(m(a), b).backward()
            o.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2, 2), nprocs=2, join=True)
