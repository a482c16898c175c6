"""The AlexNet of the example on made images in memory, without dropout: each side draws its own."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from alexnet_cifar10 import AlexNet

from apportion import Workload

IMAGES = 256


def images():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(IMAGES, 3, 32, 32, generator=generator), torch.randint(0, 10, (IMAGES,), generator=generator)
    )


workload = Workload(
    model=lambda: AlexNet(dropout=0.0),
    data=images,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    batch_size=128,
)
