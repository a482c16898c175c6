"""Parameters reduced and updated one after another, without an optimizer."""

import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
for p in net.parameters():
    dist.broadcast(p.data, 0)
X = torch.randn(48, 3)
Y = X.prod(1, keepdim=True)
for t in range(6):
    x, y = X[t * 8 : t * 8 + 8], Y[t * 8 : t * 8 + 8]
    x, y = x.chunk(w)[r], y.chunk(w)[r]
    net.zero_grad()
    loss = ((net(x) - y) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= w
            p -= 0.1 * p.grad
