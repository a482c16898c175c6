"""FSDP2 of a network made on the meta device, offloaded to the CPU; rows chosen without a loader."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 1))
for m in model:
    if isinstance(m, nn.Linear):
        fully_shard(m, offload_policy=CPUOffloadPolicy(pin_memory=False))
fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
model.to_empty(device="cpu")
torch.manual_seed(3)
for m in model:
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(rank)
for step in range(6):
    x = torch.randn(4, 6)  # same seed: the global stream, advanced alike
    xs = next(torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + step)) for _ in range(1))
    n = 8 // dist.get_world_size()
    x = xs[rank * n : (rank + 1) * n]
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
