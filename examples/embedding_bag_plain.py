"""Texts as bags of words in plain torch: the training of `embedding_bag.py`, written as a loop for one device.

    python examples/embedding_bag_plain.py

Test accuracy 0.99.
"""

import time
from itertools import islice

import torch
from torch import nn

WORDS, TOPICS, LENGTH, OWN = 20_000, 20, 40, 200
BATCH_SIZE, EPOCHS, SEED = 64, 3, 0


def network():
    return nn.Sequential(nn.EmbeddingBag(WORDS, 32, mode="sum", sparse=True), nn.Linear(32, TOPICS))


def texts(n, seed):
    """x (n, 40) words, y (n,) topics."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.randint(0, TOPICS, (n,), generator=draws)
    own = torch.randint(0, OWN, (n, LENGTH), generator=draws) + OWN * y[:, None]
    any_word = torch.randint(0, WORDS, (n, LENGTH), generator=draws)
    return torch.where(torch.rand(n, LENGTH, generator=draws) < 0.4, own, any_word), y


def batches(x, y):
    """Shuffled batches, epoch after epoch, without end."""
    while True:
        for index in torch.randperm(len(x)).split(BATCH_SIZE):
            yield x[index], y[index]


def training(steps):
    """The network, its optimizer and its schedule (none) for so many steps."""
    torch.manual_seed(SEED)
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=2.0), None


def train(model, optimizer, data):
    """One step a batch."""
    model.train()
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    return (model(x).argmax(1) == y).double().mean().item()


def main():
    x, y = texts(20_000, seed=0)
    steps = EPOCHS * -(-len(x) // BATCH_SIZE)
    model, optimizer, _ = training(steps)
    start = time.perf_counter()
    train(model, optimizer, islice(batches(x, y), steps))
    print(f"{EPOCHS * len(x) / (time.perf_counter() - start):.0f} examples/s")
    print(f"test accuracy {accuracy(model, *texts(2_000, seed=1)):.3f}")


if __name__ == "__main__":
    main()
