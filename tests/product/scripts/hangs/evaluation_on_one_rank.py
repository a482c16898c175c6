"""The first rank alone evaluates a network whose parameters are spread over all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def evaluate():
    with torch.no_grad():
        return float(model(x[:4]).square().mean())


for step in range(4):
    loss = model(x[rank::world]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 and (rank == 0 or not args.mistake):
        evaluate()
dist.destroy_process_group()
