"""A ResNet-20 for CIFAR-10 that somebody else has trained, as a spiking net: accuracy over steps, and exact neurons."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from conftest import data_folder
from torch import Tensor, nn
from torch.nn import functional

from apportion.exporting.spiking.calibration.calibrate import calibrated
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.quantized import integers, quantized, quantized_outputs
from apportion.exporting.spiking.simulator import simulate

CIFAR, WEIGHTS = "cifar-10-batches-py", "models/akamaster_resnet_cifar10/resnet20-12fca82f.th"
pytestmark = [pytest.mark.slow, pytest.mark.data(CIFAR, WEIGHTS)]


class Block(nn.Module):
    """Two convolutions and an option-A shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        self.more = (outs - ins) // 2
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        found = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more, self.more))
        return functional.relu(found + x)


class ResNet20(nn.Module):
    """He et al., 2016, for CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), *(Block(32, 32, 1) for _ in range(2)))
        self.layer3 = nn.Sequential(Block(32, 64, 2), *(Block(64, 64, 1) for _ in range(2)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        return self.linear(functional.avg_pool2d(x, 8).flatten(1))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    state = torch.load(data_folder() / WEIGHTS, map_location="cpu", weights_only=True)["state_dict"]
    made = ResNet20()
    made.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    return made.eval()


def images(files: Iterable[str], count: int, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Images as the net takes them, the first ones or drawn ones, and their classes."""
    parts = [pickle.loads((data_folder() / CIFAR / name).read_bytes(), encoding="bytes") for name in files]
    x = torch.from_numpy(np.concatenate([part[b"data"] for part in parts])).view(-1, 3, 32, 32)
    y = torch.tensor([label for part in parts for label in part[b"labels"]])
    rows = torch.arange(count)
    if seed is not None:
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (x[rows].float() / 255 - mean.view(3, 1, 1)) / deviation.view(3, 1, 1), y[rows]


def calibration() -> Tensor:
    return images([f"data_batch_{n}" for n in range(1, 6)], 128, seed=0)[0]


def right(graph: SpikingGraph, x: Tensor, y: Tensor) -> float:
    found = torch.cat([simulate(graph, part).outputs for part in x.split(50)])
    return float((found.argmax(1) == y).double().mean())


@pytest.mark.timeout(900)
def test_in_32_steps_it_is_right_in_88_percent_without_training(net: nn.Module) -> None:
    x, y = images(["test_batch"], 500)
    made = calibrated(lowered(net, x[:2]).to(torch.float32), calibration()[:64], 32)
    assert right(assembled(made.net, made.scales, 32), x, y) >= 0.88


@pytest.mark.timeout(900)
def test_exact_neurons_equal_the_quantised_net_to_the_bit(net: nn.Module) -> None:
    x, y = images(["test_batch"], 100)
    graph = quantized(lowered(net, x[:2]).to(torch.float32), calibration(), levels=15)
    correct = 0
    for part, classes in zip(x.split(50), y.split(50), strict=True):
        whole = integers(graph, part)
        expected, found = quantized_outputs(graph, whole), simulate(graph, whole)
        assert torch.equal(found.outputs.long(), expected)
        assert found.steps < graph.timesteps == 15 * 19
        correct += int((expected.argmax(1) == classes).sum())
    assert correct >= 85
