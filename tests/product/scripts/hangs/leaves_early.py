"""A rank leaves the script when its own loss is low enough."""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
for step in range(4):
    loss = model(x[rank::world]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(gradient)
    for parameter, own in zip(model.parameters(), gradient.split([6, 1]), strict=True):
        parameter.grad = own.reshape(parameter.shape) / world
    optimizer.step()
    stop = torch.tensor(float(rank == 0 and step == 2))
    if not args.mistake:
        dist.all_reduce(stop)
    if stop:
        sys.exit()
dist.destroy_process_group()
