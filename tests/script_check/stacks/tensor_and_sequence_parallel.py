"""A network of blocks, tensor and sequence parallel."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


class Block(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.norm = nn.LayerNorm(d)
        s.w1 = nn.Linear(d, 4 * d)
        s.w2 = nn.Linear(4 * d, d)

    def forward(s, x):
        return x + s.w2(F.silu(s.w1(s.norm(x))))


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb = nn.Embedding(16, 8)
        s.layers = nn.ModuleList([Block(8), Block(8)])
        s.norm = nn.LayerNorm(8)
        s.out = nn.Linear(8, 16, bias=False)

    def forward(s, x):
        h = s.emb(x)
        for layer in s.layers:
            h = layer(h)
        return s.out(s.norm(h))


torch.manual_seed(0)
net = Net()
plan = {
    "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
for i in range(2):
    plan |= {
        f"layers.{i}.norm": SequenceParallel(),
        f"layers.{i}.w1": ColwiseParallel(input_layouts=Shard(1)),
        f"layers.{i}.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
parallelize_module(net, mesh, plan)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3, foreach=True)
torch.manual_seed(5)
for _step in range(6):
    x = torch.randint(0, 16, (4, 9))
    loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
