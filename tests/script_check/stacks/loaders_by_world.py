"""Loaders that other lines make where there is one process, or the same line: once, or anew for each epoch on either
side or on both."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world = dist.get_world_size()
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
train, held_out = TensorDataset(x[:40], x[:40, :2].tanh()), TensorDataset(x[40:], x[40:, :2].tanh())


def loaders(epoch):
    if "one_line" in sys.argv:
        samplers = [None, None]
        if world > 1:
            samplers = [DistributedSampler(train, seed=2), DistributedSampler(held_out, shuffle=False)]
            samplers[0].set_epoch(epoch)
        training = DataLoader(train, batch_size=20 // world, sampler=samplers[0], shuffle=world == 1)
        evaluation = DataLoader(held_out, batch_size=10, sampler=samplers[1])
    elif world > 1:
        sampler = DistributedSampler(train, seed=2)
        sampler.set_epoch(epoch)
        training = DataLoader(train, batch_size=20 // world, sampler=sampler)
        evaluation = DataLoader(held_out, batch_size=10, sampler=DistributedSampler(held_out, shuffle=False))
    else:
        training = DataLoader(train, batch_size=20, shuffle=True)
        evaluation = DataLoader(held_out, batch_size=10)
    return training, evaluation


net = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
training, evaluation = loaders(0)
if "statistics" in sys.argv and world == 1:  # of a loader that the ranks do not have
    print("largest input", max(float(rows.abs().max()) for rows, _ in DataLoader(train, batch_size=20)))
for epoch in range(3):
    if "anew" in sys.argv or f"anew{min(world, 2)}" in sys.argv:
        training, evaluation = loaders(epoch)
    elif world > 1:
        training.sampler.set_epoch(epoch)
    for rows, target in training:
        optimizer.zero_grad()
        F.mse_loss(net(rows), target).backward()
        optimizer.step()
    with torch.no_grad():
        total = torch.zeros(2)
        for rows, target in evaluation:
            total += torch.stack(
                [F.mse_loss(net.module(rows), target, reduction="sum"), torch.tensor(float(len(rows)))]
            )
        dist.all_reduce(total)
        print(f"held out: {total[0] / total[1]:.4f}")
dist.destroy_process_group()
