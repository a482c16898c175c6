"""Optimizers of torch, subclasses of them, classes of the script's own, and wrappers."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

kind = sys.argv[1]
dist.init_process_group("gloo")


class Lion:
    """Not a subclass."""

    def __init__(s, params, lr):
        s.params = list(params)
        s.lr = lr
        s.m = [torch.zeros_like(p) for p in s.params]

    def zero_grad(s):
        for p in s.params:
            p.grad = None

    @torch.no_grad()
    def step(s):
        for p, m in zip(s.params, s.m, strict=True):
            p -= s.lr * torch.tanh(0.9 * m + 0.1 * p.grad)
            m.mul_(0.99).add_(p.grad, alpha=0.01)


class Grouped(Lion):
    def __init__(s, params, lr):
        super().__init__(params, lr)
        s.param_groups = [{"params": s.params, "lr": lr}]


class Twice(torch.optim.Adam):
    def step(self, closure=None):
        for gr in self.param_groups:
            for p in gr["params"]:
                p.data.mul_(1 - gr["lr"] * 0.1)
        return super().step(closure)


class Look:
    """A wrapper that has an optimizer."""

    def __init__(s, base):
        s.base = base
        s.n = 0

    def zero_grad(s):
        s.base.zero_grad()

    def step(s):
        s.base.step()
        s.n += 1


torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
make = {
    "lion": lambda p: Lion(p, 0.01),
    "grouped": lambda p: Grouped(p, 0.01),
    "twice": lambda p: Twice(p, 0.01),
    "look": lambda p: Look(torch.optim.SGD(p, 0.1)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": None,
    "tensorlr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}[kind]
opt = make(net.parameters())
g = torch.Generator().manual_seed(1)
x = torch.randn(48, 4, generator=g)
ds = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
s = torch.utils.data.DistributedSampler(ds, drop_last=True)
for x, y in torch.utils.data.DataLoader(ds, 4, sampler=s, drop_last=True):
    if kind == "lbfgs":

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)  # noqa: B023
            loss.backward()
            t = loss.detach().clone()
            dist.all_reduce(t, dist.ReduceOp.SUM)
            return t / dist.get_world_size()

        opt.step(closure)
    else:
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
