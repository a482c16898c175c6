"""Self-supervised training: the cross-correlation of two views' features is drawn to the identity (Barlow twins)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU())
        self.projector = nn.Linear(32, 12)

    def forward(self, first, second):
        return self.projector(self.trunk(first)), self.projector(self.trunk(second))


def standardize(features):
    return (features - features.mean(0)) / features.std(0)


def correlation_loss(first, second, weight=0.02):
    first, second = torch.cat(all_gather(first)), torch.cat(all_gather(second))
    correlation = standardize(first).T @ standardize(second) / len(first)
    diagonal = torch.diagonal(correlation)
    off_diagonal = correlation - torch.diag(diagonal)
    return (1 - diagonal).square().sum() + weight * off_diagonal.square().sum()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.randn(192, 20)
    dataset = TensorDataset(images + 0.2 * torch.randn(192, 20), images + 0.2 * torch.randn(192, 20))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=48 // world, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for first, second in loader:
            first, second = model(first, second)
            loss = correlation_loss(first, second)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
