"""The optimizer is made before the network is sharded, and holds tensors that are no longer its weights."""

import torch
import torch.distributed as dist
from common import begin, loader_of, network, rows
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

rank, world_size = begin()
loader, sampler = loader_of(rows())
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
fully_shard(model)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
