"""DistributedDataParallel with each of its options, and accumulation."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

p = argparse.ArgumentParser()
p.add_argument("--kind", required=True)
args = p.parse_args()


class D(Dataset):
    def __init__(s):
        s.x = torch.randn(70, 6, generator=torch.Generator().manual_seed(4))

    def __len__(s):
        return len(s.x)

    def __getitem__(s, i):
        return {"x": s.x[i], "y": int(i) % 3, "name": f"row{i}"}


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(6, 16)
        s.b = nn.Linear(16, 3)
        s.unused = nn.Linear(3, 3)

    def forward(s, x):
        return s.b(F.relu(s.a(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = Net()
    if args.kind != "unused":
        del net.unused
    kw = {
        "static": dict(static_graph=True),
        "view": dict(gradient_as_bucket_view=True),
        "unused": dict(find_unused_parameters=True),
    }.get(args.kind, {})
    model = DDP(net, **kw)
    if args.kind == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if args.kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if args.kind == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    opt = torch.optim.AdamW([q for q in model.parameters()], lr=1e-2)
    sampler = DistributedSampler(D())
    loader = DataLoader(
        D(),
        batch_size=5,
        sampler=sampler,
        num_workers=2 if args.kind == "view" else 0,
        persistent_workers=args.kind == "view",
    )
    accum = 2 if args.kind == "accum" else 1
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, b in enumerate(loader):
            sync = (i + 1) % accum == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = F.cross_entropy(model(b["x"]), b["y"]) / accum
                loss.backward()
            if sync:
                opt.step()
                opt.zero_grad(set_to_none=args.kind != "view")
        model.eval()
        with torch.no_grad():
            model(torch.zeros(2, 6))
        model.train()
    dist.destroy_process_group()


main()
