"""Raw tensors, a batch sampler without a loader, and gradients reduced in one flat bucket."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
w1 = (torch.randn(5, 7, generator=g) * 0.3).requires_grad_()
b1 = torch.zeros(7, requires_grad=True)
w2 = (torch.randn(7, 1, generator=g) * 0.3).requires_grad_()
params = {"w1": w1, "b1": b1, "w2": w2}
opt = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9, nesterov=True)
X = torch.randn(40, 5, generator=g)
Y = X.sum(1, keepdim=True).sin()
idx = torch.utils.data.DistributedSampler(range(40), world, rank, shuffle=True, seed=1)
for epoch in range(2):
    idx.set_epoch(epoch)
    for i in torch.utils.data.BatchSampler(idx, 5, False):
        x, y = X[i], Y[i]
        loss = ((torch.tanh(x @ w1 + b1) @ w2 - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in params.values()])
        dist.all_reduce(flat)
        flat /= world
        o = 0
        for p in params.values():
            p.grad.copy_(flat[o : o + p.numel()].view_as(p))
            o += p.numel()
        opt.step()
