"""A script that asks for a mesh of accelerators, with FSDP2."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = int(os.environ["RANK"])
dev = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(backend=dist.get_default_backend_for_device(dev))
mesh = init_device_mesh(dev.type, (dist.get_world_size(),))
torch.manual_seed(0)
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model, mesh=mesh)
model.to_empty(device="cuda")
for m in model:
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()
opt = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
for i in range(5):
    x = torch.randn(8, 8, device="cuda", generator=torch.Generator(device="cuda").manual_seed(i))
    n = 8 // dist.get_world_size()
    x = x[rank * n : (rank + 1) * n]
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        loss = (model(x).float() - x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
