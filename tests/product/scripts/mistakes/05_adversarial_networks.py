"""A generative adversarial network on points of a ring, with two optimizers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 6


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NOISE, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))

    def forward(self, noise):
        return self.layers(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, points):
        return self.critic(points)[:, 0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    angles = 6.2832 * torch.rand(128)
    dataset = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler)

    generator = DDP(Generator())
    discriminator = Discriminator()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    torch.manual_seed(100 + rank)  # each process draws noise of its own

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE)
            fake = generator(noise)
            scores = discriminator(torch.cat([real, fake.detach()]))
            targets = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
            discriminator_loss = functional.binary_cross_entropy_with_logits(scores, targets)
            discriminator_optimizer.zero_grad()
            discriminator_loss.backward()
            discriminator_optimizer.step()

            generator_loss = functional.softplus(-discriminator(fake)).mean()
            generator_optimizer.zero_grad()
            generator_loss.backward()
            generator_optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} discriminator {discriminator_loss.item():.4f} generator {generator_loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
