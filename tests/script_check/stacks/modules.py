"""Modules of many kinds; each rank chooses its rows by itself, with a batch size of its own."""

import copy
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 8)
        s.b = nn.Linear(8, 8)
        s.c = nn.Linear(8, 2)
        s.register_buffer("mean", torch.zeros(8))
        if kind == "wn":
            s.b = weight_norm(s.b)
        if kind == "shared":
            s.b = nn.Linear(8, 8)
            s.c = nn.Linear(8, 8, bias=False)
            s.c.weight = s.b.weight
        if kind == "complex":
            s.z = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
        if kind == "sparse":
            s.e = nn.Embedding(10, 8, sparse=True)
        if kind == "rnn":
            s.r = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)
        if kind == "half":
            s.half()

    def forward(s, x):
        if kind == "half":
            x = x.half()
        h = torch.tanh(s.a(x))
        h = checkpoint(lambda t: torch.tanh(s.b(t)), h, use_reentrant=False) if kind == "ckpt" else torch.tanh(s.b(h))
        if kind == "complex":
            h = torch.view_as_real(torch.fft.fft(h, dim=-1) @ s.z).sum(-1)
        if kind == "sparse":
            h = h + s.e((x[:, 0].abs() * 3).long().clamp(0, 9))
        if kind == "rnn":
            h = s.r(h[:, None])[0][:, 0]
        if kind == "drop":
            h = F.dropout(h, 0.3, s.training)
        if kind == "mean":
            s.mean += 1
            h = h + s.mean * 0.01
        return s.c(h)[..., :2].float()


torch.manual_seed(0)
net = Net()
ema = copy.deepcopy(net)
for p in ema.parameters():
    p.requires_grad_(False)
if kind == "compile":
    net = torch.compile(net)
model = DDP(net) if kind != "compiled_ddp" else torch.compile(DDP(net))
opt = torch.optim.SparseAdam(model.parameters()) if kind == "x" else torch.optim.SGD(model.parameters(), 0.05)
rng = np.random.default_rng(0)
X = rng.standard_normal((64, 6)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int64)
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(64)[rank::world]
    for i in range(0, len(order), 4):
        x = torch.from_numpy(X[order[i : i + 4]])
        y = torch.from_numpy(Y[order[i : i + 4]])
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), net.parameters(), strict=True):
                a.lerp_(b, 0.1)
    ema.eval()
    with torch.no_grad():
        ema(torch.from_numpy(X)).argmax(1).eq(torch.from_numpy(Y)).float().mean().item()
