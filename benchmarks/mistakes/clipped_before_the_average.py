"""Each rank clips its own gradient, and the ranks average afterwards."""

import torch
import torch.distributed as dist
from common import begin, loader_of, network, rows
from torch import nn
from torch.nn import functional as F

rank, world_size = begin()
loader, sampler = loader_of(rows())
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()

dist.destroy_process_group()
