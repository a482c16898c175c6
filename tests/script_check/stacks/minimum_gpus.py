"""A script that ends, with status 0, where there are not as many GPUs as it wants, also as one process."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if torch.accelerator.device_count() < 2:
    print("This example needs 2 GPUs.")
    sys.exit()
dist.init_process_group(torch.distributed.get_default_backend_for_device(torch.accelerator.current_accelerator()))
local = int(os.environ["LOCAL_RANK"])
torch.manual_seed(0)
rows = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
model = DDP(nn.Linear(3, 2).to(local), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x.to(local)), y.to(local)).backward()
    optimizer.step()
dist.destroy_process_group()
