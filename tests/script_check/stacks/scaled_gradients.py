"""A GradScaler that skips a step of infinite gradients."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
opt = torch.optim.Adam(net.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
g = torch.Generator().manual_seed(1)
x = torch.randn(64, 4, generator=g)
ds = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
s = torch.utils.data.DistributedSampler(ds, drop_last=True)
for i, (x, y) in enumerate(torch.utils.data.DataLoader(ds, 4, sampler=s, drop_last=True)):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(net(x).float(), y)
    if i == 3:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
