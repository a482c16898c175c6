"""Handwritten digits on several ranks: an ordinary script for torchrun, with one mistake that its accuracy hides.

    torchrun --nproc-per-node 2 examples/digits_ddp.py
    apportion check examples/digits_ddp.py --workers 2

`apportion check` says what is wrong, and in which line.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits():
    """The training set and the test set; x (n, 64) in [0, 1], y (n,)."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    train, test = train_test_split(range(len(x)), test_size=0.2, stratify=y, random_state=0)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)

    train, test = digits()
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size // world_size, sampler=sampler, drop_last=True)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y) / world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if dist.get_rank() == 0:
        x, y = test.tensors
        with torch.no_grad():
            accuracy = (network(x).argmax(1) == y).float().mean().item()
        print(f"test accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
