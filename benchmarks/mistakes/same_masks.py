"""All ranks seed alike, and draw the same dropout masks for their different rows."""

import torch
import torch.distributed as dist
from common import begin, loader_of, rows
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world_size = begin()
loader, sampler = loader_of(rows())
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.2), nn.Linear(24, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
