"""A convolutional classifier whose accuracy on held-out images is measured after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(rows, 1, 8, 8, generator=generator)
        self.labels = (self.images[:, 0, :, :4].sum((1, 2)) > self.images[:, 0, :, 4:].sum((1, 2))).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.norm = nn.GroupNorm(4, 8)
        self.head = nn.Linear(72, 2)

    def forward(self, images):
        return self.head(functional.relu(self.norm(self.conv(images))).flatten(1))


def evaluate(model, held_out, rank, world):
    loader = DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False))
    model.eval()
    accuracies = []
    with torch.no_grad():
        for images, labels in loader:
            accuracies.append((model(images).argmax(1) == labels).double().mean())
    model.train()
    accuracy = torch.stack(accuracies).mean()
    dist.all_reduce(accuracy)
    return accuracy.item() / world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset, held_out = Images(128, 1), Images(37, 2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler)
    network = Network()
    model = DDP(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(network, held_out, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
