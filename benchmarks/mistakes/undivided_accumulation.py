"""The gradients of four micro-batches are summed, and not divided by four."""

import torch
import torch.distributed as dist
from common import begin, loader_of, network, rows
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world_size = begin()
loader, sampler = loader_of(rows(128), batch_size=32)
model = DistributedDataParallel(network())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.mse_loss(model(part_x), part_y)
            loss.backward()
        optimizer.step()

dist.destroy_process_group()
