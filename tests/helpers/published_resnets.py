"""The published ResNets for CIFAR-10 (github.com/akamaster/pytorch_resnet_cifar10) with their weights, and the images
that they were trained and are tested on."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGES, MODELS = "cifar-10-batches-py", "models/akamaster_resnet_cifar10"
"""The data sets, as the mark ``data`` names them."""
PUBLISHED = {20: 0.9173, 32: 0.9263, 44: 0.9310, 56: 0.9339}
"""Their test accuracy, by the number of layers."""


def published_resnet(depth: int) -> nn.Module:
    """The net of so many layers, with the published weights, of a test that is marked ``data(MODELS)``."""
    root = os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data"
    (path,) = (Path(root) / MODELS).glob(f"resnet{depth}-*.th")
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    net: nn.Module = _example("resnet20_cifar10").ResNet((depth - 2) // 6)
    net.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    return net.eval()


def training_images(count: int) -> tuple[Tensor, Tensor]:
    """Images of the training batches, normalised, and their labels."""
    x, y = _example("cifar10_data").training_set()
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]
    return _example("resnet20_cifar10").normalised(x[rows].float()), y[rows]


@cache
def unseen_images() -> tuple[Tensor, Tensor]:
    """All test images, normalised, and their labels."""
    x, y = _example("cifar10_data").test_set()
    return _example("resnet20_cifar10").normalised(x.float()), y


def _example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return __import__(name)
