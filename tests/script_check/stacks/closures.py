"""Optimizers whose step is given a closure that computes the gradients, with accumulation and clipping."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :2].tanh())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
net = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)


def backward(rows, target):
    loss = F.mse_loss(net(rows), target) / 2
    loss.backward()
    return loss


for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (rows, target) in enumerate(loader):
        if number % 2 == 0:
            with net.no_sync() if dist.get_world_size() > 1 else contextlib.nullcontext():
                optimizer.zero_grad()
                backward(rows, target)
            continue

        def closure():
            loss = backward(rows, target)  # noqa: B023
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            return loss

        optimizer.step(closure)
dist.destroy_process_group()
