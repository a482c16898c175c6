"""Loaders of many kinds, and what scripts do with them."""

import argparse
import collections
import dataclasses
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

kind = None
Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    n: list


class Rows(Dataset):
    def __init__(s, kind):
        s.kind = kind
        s.g = torch.Generator().manual_seed(3)
        s.x = torch.randn(75, 6, generator=s.g)
        s.len = [3 + i % 5 for i in range(75)]

    def __len__(s):
        return 75

    def __getitem__(s, i):
        x = s.x[i]
        if s.kind == "augment":
            x = x + 0.1 * torch.randn(6)
        if s.kind == "pad":
            return x[: s.len[i]], i % 3
        if s.kind == "named":
            return Pair(x, i % 3)
        if s.kind == "numpy":
            return x.numpy(), i % 3
        return x, i % 3


class Stream(IterableDataset):
    def __init__(s, rank, world):
        s.rank, s.world = rank, world

    def __iter__(s):
        w = get_worker_info()
        n, k = (w.num_workers, w.id) if w else (1, 0)
        for i in range(s.rank, 64, s.world):
            if (i // s.world) % n == k:
                yield torch.full((6,), float(i)).sin(), i % 3


class Sized:
    """A prefetching wrapper."""

    def __init__(s, loader):
        s.loader = loader

    def __len__(s):
        return len(s.loader)

    def __iter__(s):
        last = None
        for b in s.loader:
            if last is not None:
                yield last
            last = b
        yield last


def pad(rows):
    xs, ys = zip(*rows, strict=True)
    out = torch.zeros(len(xs), max(map(len, xs)))
    mask = torch.zeros_like(out)
    for i, x in enumerate(xs):
        out[i, : len(x)] = x
        mask[i, : len(x)] = 1
    return {"x": out, "mask": mask, "y": torch.tensor(ys)}


def data(rows):
    xs, ys = zip(*rows, strict=True)
    return Batch(torch.stack(xs), torch.tensor(ys), [f"r{y}" for y in ys])


def main():  # noqa: C901
    p = argparse.ArgumentParser()
    p.add_argument("kind")
    p.add_argument("--workers", type=int, default=0)
    kind = p.parse_args().kind
    workers = p.parse_args().workers
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    torch.manual_seed(100 + rank)
    opt = torch.optim.AdamW(net.parameters(), 1e-2)
    more = {}
    if kind == "spawn":
        more = dict(num_workers=2, multiprocessing_context="spawn")
    if workers:
        more = dict(num_workers=workers, persistent_workers=True)
    if kind in ("stream",):
        ds = Stream(rank, world)
        loader = DataLoader(ds, batch_size=4, **more)
        s = None
    else:
        ds = Rows(kind)
        s = DistributedSampler(ds, drop_last=True)
        if kind == "batchsampler":
            loader = DataLoader(ds, batch_sampler=torch.utils.data.BatchSampler(s, 5, False))
        else:
            loader = DataLoader(
                ds,
                batch_size=5,
                sampler=s,
                collate_fn=pad if kind == "pad" else data if kind == "dataclass" else None,
                drop_last=kind == "drop",
                **more,
            )
    it = loader
    if kind == "list":
        it = list(loader)
    if kind == "prefetch":
        it = Sized(loader)
    if kind == "cycle":
        endless = itertools.cycle(loader)
        it = None
    for epoch in range(2):
        if s is not None:
            s.set_epoch(epoch)
        for b in it if it is not None else (next(endless) for _ in range(6)):
            if kind == "pad":
                x = b["x"]
                x = F.pad(x, (0, 6 - x.shape[1]))
                y = b["y"]
            elif kind in ("dataclass", "named"):
                x, y = b.x, b.y
            else:
                x, y = b
            loss = F.cross_entropy(net(x.float()), y)
            opt.zero_grad()
            loss.backward()
            opt.step()


if __name__ == "__main__":
    main()
