"""Small networks of each kind on scikit-learn's digits, one function each: what docs/book.md divides in every way.

    apportion check "examples/small_networks.py:convolutions" --strategy conv_parallel --workers 2

Nothing is downloaded, and each trains in seconds on two cores.
"""

import torch
from digits import digits
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload


class Recurrent(nn.Module):
    """Reads the eight rows of an image one after the other, through several LSTM layers."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.cells, self.out = nn.LSTM(8, hidden, num_layers=layers, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x):
        return self.out(self.cells(x.view(-1, 8, 8))[0][:, -1])


def images(dataset):
    """The same examples as images of one channel."""
    x, y = dataset.tensors
    return TensorDataset(x.view(-1, 1, 8, 8), y)


def trained(model, data=lambda: digits()[0], test=lambda: digits()[1], lr=0.1, batch_size=64, epochs=5, **more):
    """Any of these networks with SGD and momentum."""
    return Workload(
        model=model,
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=batch_size,
        epochs=epochs,
        evaluation=Evaluation(data=test),
        **more,
    )


def dense(width=64, lr=0.1, batch_size=64, epochs=5, accumulate=1):
    """Fully connected layers."""
    return trained(
        lambda: nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        ),
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
        accumulate=accumulate,
    )


def convolutions(channels=16, epochs=5):
    """Partially connected layers: convolutions and pooling, and one fully connected layer."""
    return trained(
        lambda: nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * 16, 10),
        ),
        data=lambda: images(digits()[0]), test=lambda: images(digits()[1]), lr=0.05, epochs=epochs,
    )  # fmt: skip


def alexnet(channels=16, width=256, epochs=5):
    """Convolutions with few weights, then fully connected layers with most of them, as in AlexNet."""
    return trained(
        lambda: nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(channels * 16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
        ),
        data=lambda: images(digits()[0]), test=lambda: images(digits()[1]), lr=0.05, epochs=epochs,
    )  # fmt: skip


def recurrent(layers=2, hidden=32, epochs=5):
    """A deep recurrent network."""
    return trained(lambda: Recurrent(layers, hidden), lr=0.2, epochs=epochs)
