"""A hand-written pipeline whose second stage returns the gradient of the last micro-batch only sometimes."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
first, second = nn.Linear(6, 4), nn.Linear(4, 2)
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.SGD((first if rank == 0 else second).parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    for rows in x.chunk(2):
        if rank == 0:
            hidden = first(rows)
            dist.send(hidden.detach(), dst=1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, src=1)
            hidden.backward(gradient)
        elif rank == 1:
            hidden = torch.empty(len(rows), 4)
            dist.recv(hidden, src=0)
            hidden.requires_grad_()
            second(hidden).square().mean().backward()
            if not (args.mistake and step == 1):
                dist.send(hidden.grad, dst=0)
    optimizer.step()
dist.destroy_process_group()
