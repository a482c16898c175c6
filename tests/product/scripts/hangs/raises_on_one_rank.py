"""A check of the data raises on the rank that reads the bad example."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
if args.mistake:
    x[27] = float("nan")
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def checked(rows):
    if not torch.isfinite(rows).all():
        raise ValueError("the batch has values that are not finite")
    return rows


for step in range(5):
    rows = x[8 * step : 8 * step + 8].chunk(world)[rank]
    loss = model(checked(rows)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
