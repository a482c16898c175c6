"""A small image classifier; every process averages its gradients in flat buckets, as DDP does, by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BUCKET_ELEMENTS = 1024


class Classifier(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.norm2 = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16 * 16, classes)

    def forward(self, images):
        hidden = functional.relu(self.norm1(self.conv1(images)))
        hidden = functional.relu(self.norm2(self.conv2(hidden)))
        return self.head(hidden.flatten(1))


def reduce_bucket(gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    means = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def average_gradients(model):
    bucket, elements = [], 0
    for parameter in reversed(list(model.parameters())):
        bucket.append(parameter.grad)
        elements += parameter.grad.numel()
        if elements >= BUCKET_ELEMENTS:
            reduce_bucket(bucket)
            bucket, elements = [], 0


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.randn(120, 1, 8, 8)
    labels = (images[:, 0, :4, :4].mean((1, 2)) > 0).long() + 2 * (images[:, 0, 4:, 4:].mean((1, 2)) > 0).long()
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=24 // world, sampler=sampler)

    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            loss = functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
