"""A head is trained that is not a part of the wrapped network."""

import torch
import torch.distributed as dist
from common import begin, loader_of, network, rows
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world_size = begin()
loader, sampler = loader_of(rows())
body = DistributedDataParallel(network())
head = nn.Linear(1, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(head(body(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
