"""Each rank reduces a histogram that is as long as its own largest label requires."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 7)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(3)
for _step in range(4):
    x, labels = torch.randn(12, 4, generator=generator), torch.randint(0, 4, (12,), generator=generator)
    labels[-1] = 6
    x, labels = x.chunk(world)[rank], labels.chunk(world)[rank]
    nn.functional.cross_entropy(model(x), labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
    counts = torch.bincount(labels, minlength=0 if args.mistake else 7)
    dist.all_reduce(counts)
dist.destroy_process_group()
