"""Every rank reads all rows, in the same order."""

import torch
import torch.distributed as dist
from common import begin, network, rows
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank, world_size = begin()
loader = DataLoader(rows(), batch_size=8, shuffle=True)
model = DistributedDataParallel(network())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
