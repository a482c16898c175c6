"""Batches that are more than tensors of rows: images of unequal sizes, boxes, graphs, and two views of each row."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

p = argparse.ArgumentParser()
p.add_argument("kind", choices=["images", "samples", "graphs", "views"])
p.add_argument("--workers", type=int, default=0)
a = p.parse_args()


class Items(Dataset):
    """Items of unequal sizes: points, boxes, and a label."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        size = 4 if a.kind in ("graphs", "views") else 3 + i % 4
        boxes = torch.randn(1 + i % 3, 3, generator=g)
        return {"points": torch.randn(size, 3, generator=g), "boxes": boxes, "label": float(i % 5)}


def images(items):
    return tuple(item["points"] for item in items), tuple(
        {"boxes": item["boxes"], "label": item["label"]} for item in items
    )


def graphs(items):
    """Each graph is a ring; nodes and edges of all graphs are in one tensor each."""
    nodes = torch.arange(4)
    ring = torch.stack([nodes, nodes.roll(1)])
    edges = torch.cat([ring + 4 * number for number in range(len(items))], 1)
    graph = torch.arange(len(items)).repeat_interleave(4)
    return torch.cat([item["points"] for item in items]), edges, graph, torch.tensor([item["label"] for item in items])


def views(items):
    points = torch.stack([item["points"].flatten() for item in items])
    return torch.cat([points, points.flip(1)]), torch.tensor([item["label"] for item in items])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.point, self.box, self.out = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, points, boxes):
        pooled = [self.point(p).tanh().sum(0) + self.box(b).tanh().mean(0) for p, b in zip(points, boxes, strict=True)]
        return self.out(torch.stack(pooled)).squeeze(1)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.node, self.message, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, nodes, edges, graph, count):
        h = self.node(nodes).tanh()
        h = h + torch.zeros_like(h).index_add(0, edges[1], self.message(h)[edges[0]]).tanh()
        return self.out(torch.zeros(count, 8, dtype=h.dtype).index_add(0, graph, h)).squeeze(1)


def loss_of(model, batch):
    if a.kind == "graphs":
        nodes, edges, graph, y = batch
        return nn.functional.mse_loss(model(nodes, edges, graph, len(y)), y)
    if a.kind == "views":
        one, two = model(batch[0]).chunk(2)
        return (one - two).pow(2).mean() + nn.functional.mse_loss(one.mean(1), batch[1])
    if a.kind == "images":
        batch = [{"points": points, **target} for points, target in zip(*batch, strict=True)]
    found = model([item["points"] for item in batch], [item["boxes"] for item in batch])
    return nn.functional.mse_loss(found, torch.tensor([item["label"] for item in batch], dtype=found.dtype))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = {"graphs": GraphNet, "views": lambda: nn.Linear(12, 5)}.get(a.kind, Net)()
    model = DistributedDataParallel(network)
    data = Items()
    sampler = DistributedSampler(data)
    collate = {"images": images, "samples": list, "graphs": graphs, "views": views}[a.kind]
    loader = DataLoader(data, 5, sampler=sampler, collate_fn=collate, num_workers=a.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
