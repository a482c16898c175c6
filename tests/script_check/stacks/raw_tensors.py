"""Tensors in a list, updated without an optimizer and without a module."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
params = [torch.randn(3, 5) * 0.3, torch.zeros(5), torch.randn(5, 1) * 0.3]
for p in params:
    p.requires_grad_(True)
X = torch.randn(48, 3)
Y = X.prod(1, keepdim=True)


def step(x, y):
    h = torch.tanh(x @ params[0] + params[1]) @ params[2]
    loss = ((h - y) ** 2).mean()
    loss.backward()
    for p in params:
        dist.all_reduce(p.grad)
        p.data -= 0.1 * p.grad / w
        p.grad = None


for t in range(6):
    step(X[t * 8 : t * 8 + 8].chunk(w)[r], Y[t * 8 : t * 8 + 8].chunk(w)[r])
