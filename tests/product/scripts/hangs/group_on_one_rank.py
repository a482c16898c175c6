"""A group is made by its members alone, although all ranks have to make it."""

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
if rank == 0 or not args.mistake:
    logging_group = dist.new_group([0])
everyone = dist.new_group(list(range(world)))
model = DistributedDataParallel(nn.Linear(6, 3), process_group=everyone)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
for _step in range(3):
    loss = model(x[rank::world]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
