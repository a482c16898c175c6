"""Five convolutions of 3x3, 32 channels, over images of 256x256: large images in a small batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from apportion import Workload

IMAGES, SIZE, CHANNELS = 8, 256, 32


def network():
    layers, channels = [], 3
    for _ in range(5):
        layers += [nn.Conv2d(channels, CHANNELS, 3, padding=1), nn.ReLU()]
        channels = CHANNELS
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def images():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator), torch.randint(0, 10, (IMAGES,), generator=generator)
    )


workload = Workload(
    model=network,
    data=images,
    loss=F.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    batch_size=2,
    steps=1_000_000,
)
