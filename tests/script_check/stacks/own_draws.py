"""Draws of each rank's own: rows mixed with each other by one number for a batch, dropped paths, and a simulation."""

import argparse
import random
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("kind", choices=["mixup", "paths", "replay"])
a = p.parse_args()


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        keep = x.new_empty((len(x), 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate) if self.training else x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.drop = DropPath(0.2)

    def forward(self, x):
        return x + self.drop(self.layers(x))


def mixed_loss(model, x, y):
    if a.kind == "paths":
        return F.cross_entropy(model(x), y)
    share, other = np.random.beta(0.4, 0.4), torch.randperm(len(x))
    found = model(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(found, y) + (1 - share) * F.cross_entropy(found, y[other])


def epochs(model, optimizer):
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, 12, sampler=sampler):
            loss = mixed_loss(model, *batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()


def replay(model, optimizer):
    """Q-learning from a memory of what each rank has seen of its own simulation."""
    memory, state = deque(maxlen=100), torch.randn(12)
    for step in range(60):
        with torch.no_grad():
            action = random.randrange(4) if random.random() < 0.3 else int(model.module(state[None]).argmax())
        following = 0.8 * state + 0.2 * torch.randn(12) + 0.1 * action
        memory.append((state, action, -float(following.abs().mean()), following))
        state = following
        if len(memory) >= 20 and step % 4 == 0:
            states, actions, rewards, later = zip(*random.sample(memory, 8), strict=True)
            with torch.no_grad():
                wanted = torch.tensor(rewards) + 0.9 * model.module(torch.stack(later)).max(1).values
            found = model(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(found, wanted).backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [] if a.kind == "replay" else [Block(), Block()]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), *blocks, nn.Linear(16, 4)))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    (replay if a.kind == "replay" else epochs)(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
