"""The rows are divided among the ranks by hand, and nothing makes the numbers of batches equal."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = 49 if args.mistake else 48
x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x), batch_size=8, sampler=list(range(rank, rows, world)))
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for (xb,) in loader:
        loss = model(xb).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = torch.tensor([float(loss)])
    dist.all_reduce(total)
dist.destroy_process_group()
