"""Classifies bags of words; two loader processes for each rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Bags(Dataset):
    def __init__(self, rows=128, words=60):
        generator = torch.Generator().manual_seed(8)
        self.words = torch.randint(0, words, (rows, 9), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return words, int(words.float().mean() > 30)


class BagClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, words):
        return self.layers(self.bag(words))


class Trainer:
    def __init__(self, model, loader, optimizer, rank):
        self.model, self.loader, self.optimizer, self.rank = model, loader, optimizer, rank

    def run_epoch(self, epoch):
        total = 0.0
        for words, labels in self.loader:
            loss = functional.cross_entropy(self.model(words), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        if self.rank == 0:
            print(f"epoch {epoch} loss {total / len(self.loader):.4f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            self.run_epoch(epoch)


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = Bags()
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size // world, sampler=sampler, num_workers=args.workers)
    model = DDP(BagClassifier())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    Trainer(model, loader, optimizer, rank).train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
