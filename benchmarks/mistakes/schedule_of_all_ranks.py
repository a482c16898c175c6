"""The schedule is advanced by the number of ranks at each step."""

import torch
import torch.distributed as dist
from common import begin, loader_of, network, rows
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world_size = begin()
loader, sampler = loader_of(rows())
model = DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for _ in range(world_size):
            schedule.step()

dist.destroy_process_group()
