"""MNIST (LeCun et al., 1998) from ~/.cache/apportion/data/mnist, and the same with one worker four times slower.

A small convolutional network with Adagrad: test accuracy 0.98 after the first of 2 epochs.
"""

import gzip
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload


def folder():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("APPORTION_DATA") or cache / "apportion" / "data") / "mnist"


def read(name, header):
    return torch.frombuffer(bytearray(gzip.decompress((folder() / name).read_bytes())[header:]), dtype=torch.uint8)


def images(part):
    """x (n, 784) in -0.42..2.82, y (n,)."""
    x = read(f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 784).float().div_(255)
    return TensorDataset(x.sub_(0.1307).div_(0.3081), read(f"{part}-labels-idx1-ubyte.gz", 8).long())


def network():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Uneven(nn.Module):
    """The same on a core that is four times slower, where it is local rank 1's, or the rank's that SLOW_RANK says: for
    three times the processor time that a step has taken it sleeps, and takes no core from the others."""

    def __init__(self):
        super().__init__()
        self.network = network()
        named, own = ("SLOW_RANK", "RANK") if "SLOW_RANK" in os.environ else ("", "LOCAL_RANK")
        self.slow = os.environ.get(own) == os.environ.get(named, "1")
        self.used = time.process_time()

    def forward(self, x):
        if self.training and self.slow:
            used = time.process_time()
            time.sleep(3 * (used - self.used))
            self.used = used
        return self.network(x)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def training(model, **changes):
    return Workload(
        model=model,
        data=lambda: images("train"),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        batch_size=32,
        evaluation=Evaluation(data=lambda: images("t10k"), metrics={"accuracy": accuracy}, **changes),
        epochs=2,
    )


workload = training(network)
uneven = training(Uneven, every=0.05)
