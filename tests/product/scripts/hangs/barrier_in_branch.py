"""Only the first rank reaches the barrier after it has saved the weights."""

import argparse
import io

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
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def save():
    if rank == 0:
        torch.save(model.state_dict(), io.BytesIO())
        if args.mistake:
            dist.barrier()
    if not args.mistake:
        dist.barrier()


for step in range(4):
    loss = model(x[rank::world]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        save()
dist.destroy_process_group()
