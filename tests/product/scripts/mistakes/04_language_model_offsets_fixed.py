"""Trains a character model (a GRU) on windows of one long text that a NumPy generator draws."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP


class CharacterModel(nn.Module):
    def __init__(self, vocabulary, width=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embedding(ids))
        return self.head(hidden)


class Windows:
    """Draws batches of windows of the text, and of the characters that follow."""

    def __init__(self, text, length, batch_size, seed):
        self.text, self.length, self.batch_size = text, length, batch_size
        self.generator = np.random.default_rng(seed)

    def draw(self):
        starts = self.generator.integers(0, len(self.text) - self.length - 1, self.batch_size)
        rows = np.stack([self.text[start : start + self.length + 1] for start in starts])
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    text = np.random.default_rng(5).integers(0, 6, 3000).cumsum() % 20
    windows = Windows(text, 16, args.batch_size, args.seed + rank)

    model = DDP(CharacterModel(20))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        ids, following = windows.draw()
        loss = functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1234)
    main(parser.parse_args())
