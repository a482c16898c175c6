"""Handwritten digits in plain torch: the training of `digits.py`, written as a loop for one device.

    python examples/digits_plain.py

Test accuracy 0.983.
"""

import time
from itertools import islice

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

BATCH_SIZE, EPOCHS, SEED = 64, 30, 0


def network():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def digits():
    """x_train, x_test, y_train, y_test; x (n, 64) in [0, 1], y (n,)."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=0)
    as_float = [torch.tensor(x, dtype=torch.float32) for x in (x_train, x_test)]
    return *as_float, torch.tensor(y_train), torch.tensor(y_test)


def batches(x, y):
    """Shuffled batches, epoch after epoch, without end."""
    while True:
        for index in torch.randperm(len(x)).split(BATCH_SIZE):
            yield x[index], y[index]


def training(steps):
    """The network, its optimizer and its schedule for so many steps."""
    torch.manual_seed(SEED)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train(model, optimizer, schedule, data):
    """One step a batch."""
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    return (model(x).argmax(1) == y).double().mean().item()


def main():
    x_train, x_test, y_train, y_test = digits()
    steps = EPOCHS * -(-len(x_train) // BATCH_SIZE)
    model, optimizer, schedule = training(steps)
    start = time.perf_counter()
    train(model, optimizer, schedule, islice(batches(x_train, y_train), steps))
    print(f"{EPOCHS * len(x_train) / (time.perf_counter() - start):.0f} examples/s")
    print(f"test accuracy {accuracy(model, x_test, y_test):.3f}")


if __name__ == "__main__":
    main()
