"""Two networks, each with an optimizer of its own, trained against each other."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
D = DDP(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
og = torch.optim.Adam(G.parameters(), 1e-3, betas=(0.5, 0.999))
od = torch.optim.Adam(D.parameters(), 1e-3, betas=(0.5, 0.999))
g = torch.Generator().manual_seed(1)
ds = torch.utils.data.TensorDataset(torch.randn(48, 2, generator=g), torch.randn(48, 4, generator=g))
s = torch.utils.data.DistributedSampler(ds, drop_last=True)
for real, z in torch.utils.data.DataLoader(ds, 4, sampler=s, drop_last=True):
    od.zero_grad()
    fake = G(z)
    dl = F.binary_cross_entropy_with_logits(D(real), torch.ones(len(real), 1))
    dl.backward()
    dl = F.binary_cross_entropy_with_logits(D(fake.detach()), torch.zeros(len(real), 1))
    dl.backward()
    od.step()
    og.zero_grad()
    gl = F.binary_cross_entropy_with_logits(D(fake), torch.ones(len(real), 1))
    gl.backward()
    og.step()
