"""The ranks average two figures in different order."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
parser.add_argument("--alike", action="store_true", help="both figures are single numbers")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
for _step in range(3):
    outputs = model(x[rank::world])
    loss = outputs.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses, means = loss.detach().reshape(1), outputs.detach().mean(0)
    means = means[:1] if args.alike else means
    if args.mistake and rank == 1:
        dist.all_reduce(means)
        dist.all_reduce(losses)
    else:
        dist.all_reduce(losses)
        dist.all_reduce(means)
dist.destroy_process_group()
