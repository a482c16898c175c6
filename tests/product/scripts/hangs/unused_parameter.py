"""A branch of the network is left out on the rank whose batch has nothing for it."""

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


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.usual, self.rare = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, rows, kinds):
        hidden = self.body(rows).relu()
        total = self.usual(hidden).square().mean()
        if kinds.any() or not args.mistake:
            total = total + (self.rare(hidden).square().squeeze(1) * kinds).mean()
        return total


model = DistributedDataParallel(Network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
kinds = torch.arange(64) % 16 == 0
for step in range(4):
    rows = slice(16 * step + rank, 16 * step + 16, world)
    loss = model(x[rows], kinds[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
