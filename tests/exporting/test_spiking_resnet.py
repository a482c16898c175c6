"""A ResNet-20 for CIFAR-10 that somebody else has trained, as a spiking net: accuracy over steps, and exact neurons."""

from __future__ import annotations

import pytest
import torch
from published_resnets import IMAGES, MODELS, published_resnet, training_images, unseen_images
from torch import Tensor, nn

from apportion.exporting.spiking.calibration.calibrate import calibrated
from apportion.exporting.spiking.compile import integers, quantized, quantized_outputs
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.graph import Neurons, SpikingGraph
from apportion.exporting.spiking.simulator import simulate

pytestmark = [pytest.mark.slow, pytest.mark.data(IMAGES, MODELS)]


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return published_resnet(20)


def unseen(count: int) -> tuple[Tensor, Tensor]:
    """The first test images and their classes."""
    x, y = unseen_images()
    return x[:count], y[:count]


def calibration() -> Tensor:
    return training_images(128)[0]


def right(graph: SpikingGraph, x: Tensor, y: Tensor) -> float:
    found = torch.cat([simulate(graph, part).outputs for part in x.split(50)])
    return float((found.argmax(1) == y).double().mean())


@pytest.mark.timeout(900)
def test_in_32_steps_it_is_right_in_88_percent_without_training(net: nn.Module) -> None:
    x, y = unseen(500)
    made = calibrated(lowered(net, x[:2]).to(torch.float32), calibration()[:64], 32)
    assert right(assembled(made.net, made.scales, 32), x, y) >= 0.88


@pytest.mark.timeout(900)
def test_in_8_steps_neurons_that_fire_several_times_a_step_are_right_in_89_percent(net: nn.Module) -> None:
    x, y = unseen(500)
    neurons = Neurons(name="", shape=(), threshold=torch.ones(()), reset="subtract_clipped_multi")
    made = calibrated(lowered(net, x[:2]).to(torch.float32), calibration(), 8, reset=neurons.reset)
    assert right(assembled(made.net, made.scales, 8, like=neurons), x, y) >= 0.89


@pytest.mark.timeout(900)
def test_exact_neurons_equal_the_quantised_net_to_the_bit(net: nn.Module) -> None:
    x, y = unseen(100)
    graph = quantized(lowered(net, x[:2]).to(torch.float32), calibration(), levels=15)
    correct = 0
    for part, classes in zip(x.split(50), y.split(50), strict=True):
        whole = integers(graph, part)
        expected, found = quantized_outputs(graph, whole), simulate(graph, whole)
        assert torch.equal(found.outputs.long(), expected)
        assert found.steps < graph.timesteps == 15 * 19
        correct += int((expected.argmax(1) == classes).sum())
    assert correct >= 85
