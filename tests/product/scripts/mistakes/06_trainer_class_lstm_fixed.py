"""An LSTM that classifies sequences, trained by a class that averages the gradients of all processes."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sequences(Dataset):
    def __init__(self, rows, length=12):
        generator = torch.Generator().manual_seed(11)
        self.values = torch.randn(rows, length, 3, generator=generator)
        self.labels = (self.values.sum((1, 2)) > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"values": self.values[index], "label": self.labels[index]}


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, values):
        return self.head(self.lstm(values)[0][:, -1])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed + self.rank)
        self.model = SequenceClassifier()
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, src=0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        dataset = Sequences(96)
        self.sampler = DistributedSampler(dataset, seed=args.seed)
        self.loader = DataLoader(dataset, batch_size=args.batch_size // self.world, sampler=self.sampler)

    def step(self, batch):
        loss = functional.cross_entropy(self.model(batch["values"]), batch["label"])
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world
        self.optimizer.step()
        return loss.item()

    def run(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.step(batch) for batch in self.loader]
            self.schedule.step()
            if self.rank == 0:
                print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
