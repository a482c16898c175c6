"""The training of a net for few steps: its spikes are the simulator's, and its gradient is that of the stated slope."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from apportion.exporting.spiking.calibration.calibrate import Calibrated
from apportion.exporting.spiking.calibration.fine_tune import fine_tuned, spike_train, spiking_activations
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.conversion.rate_net import RateNet, computed
from apportion.exporting.spiking.graph import Neurons, Reset
from apportion.exporting.spiking.simulator import simulate

RESETS: tuple[Reset, ...] = "subtract", "zero", "subtract_clipped_multi"
STEPS = 5


def neurons(reset: Reset, *, strictly: bool = False) -> Neurons:
    return Neurons(name="", shape=(3,), threshold=torch.ones((), dtype=torch.float64), reset=reset, strictly=strictly)


def step_by_step(reset: Reset, moving: Tensor, each: Tensor, scale: Tensor) -> Tensor:
    """The spikes by a loop that torch differentiates, with a straight line of the stated slope behind each step."""
    out, v = [], torch.zeros_like(each)
    for flow in moving.split(len(each)):
        v = v + flow + each
        share = v / scale
        if reset == "subtract_clipped_multi":
            slope = share.detach().clamp(0, 1)
            v = torch.maximum(v, -scale.detach())
            whole = torch.floor(v / scale).clamp(min=0).detach()
        else:
            slope = (1 - (share.detach() - 1).abs()).clamp(min=0)
            whole = (share.detach() >= 1).double()
        spikes = whole + slope * (share - share.detach())
        out.append(scale * spikes)
        v = v * (1 - whole) if reset == "zero" else v - out[-1]
    return torch.cat(out)


@pytest.mark.parametrize("reset", RESETS)
def test_the_gradient_is_that_of_the_stated_slope(reset: Reset) -> None:
    drawn = torch.Generator().manual_seed(1)
    moving = torch.randn(STEPS * 4, 3, generator=drawn, dtype=torch.float64).requires_grad_()
    each = torch.rand(4, 3, generator=drawn, dtype=torch.float64).requires_grad_()
    scale = torch.tensor([0.7, 1.0, 1.6], dtype=torch.float64, requires_grad=True)
    weight = torch.randn(STEPS * 4, 3, generator=drawn, dtype=torch.float64)
    expected = step_by_step(reset, moving, each, scale)
    found = spike_train(replace(neurons(reset), threshold=scale), moving, each, STEPS)
    assert torch.allclose(found, expected, atol=1e-12)
    assert found.count_nonzero() > 5
    wanted = torch.autograd.grad((expected * weight).sum(), (moving, each, scale))
    own = torch.autograd.grad((found * weight).sum(), (moving, each, scale))
    for ours, theirs in zip(own, wanted, strict=True):
        assert theirs.count_nonzero()
        assert (ours - theirs).abs().max() <= 1e-10


def test_what_flows_in_too_late_to_fire_has_no_gradient_and_what_flows_in_for_long_has_that_of_the_activation() -> None:
    steps, each = 98, torch.full((1, 1), 0.31, dtype=torch.float64, requires_grad=True)  # ends at a membrane of 0.38
    one = replace(neurons("subtract"), shape=(1,), threshold=torch.ones(1, dtype=torch.float64))
    moving = torch.zeros(steps, 1, dtype=torch.float64, requires_grad=True)
    train = spike_train(one, moving, each, steps)
    of_moving, of_each = torch.autograd.grad(train.sum(), (moving, each))
    assert of_moving[:60].min() > 0.99
    assert of_moving[-1].item() == pytest.approx(0.38)
    assert of_each.item() == pytest.approx(steps, rel=0.05)


def small_net() -> tuple[nn.Module, RateNet, tuple[Tensor, ...], Tensor]:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 3),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
    x = torch.rand(6, 1, 8, 8)
    net = lowered(module, x[:2]).to(torch.float32)
    scales = tuple(a.transpose(0, 1).flatten(1).amax(1).clamp(min=0.05) for a in computed(net, x)[:-1])
    return module, net, scales, x


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("strictly", [False, True])
def test_what_is_trained_fires_as_the_simulator_does(reset: Reset, strictly: bool) -> None:
    _, net, scales, x = small_net()
    like = Neurons(name="", shape=(), threshold=torch.ones(()), reset=reset, strictly=strictly)
    *rates, outputs = spiking_activations(net, list(scales), STEPS, x, like=like)
    graph = assembled(net.to(torch.float64), [s.double() for s in scales], STEPS, like=like)
    found = simulate(graph, x)
    for rate, scale, count in zip(rates, scales, found.counts.values(), strict=True):
        expected = count * scale.double().reshape(-1, 1, 1) / STEPS
        assert expected.count_nonzero()
        assert (rate - expected).abs().max() < 1e-5
    assert torch.allclose(outputs.double(), found.outputs, atol=1e-5)


def test_items_are_joined_as_the_workload_joins_them_and_a_silent_stage_is_learned_too() -> None:
    _, net, scales, x = small_net()
    joined: list[int] = []

    def collate(items: list[Tensor]) -> tuple[Tensor, None]:
        joined.append(len(items))
        return torch.stack(items) / 255, None

    def teacher(some: Tensor) -> list[Tensor]:
        assert some.max() <= 1
        first, *others = computed(net, some)
        return [torch.zeros_like(first), *others]

    images = list((x * 255).round())
    start = Calibrated(net=net, scales=scales)
    tuned = fine_tuned(start, 4, data=images, collate=collate, teacher=teacher, examples=128)  # type: ignore[arg-type]
    assert joined == [64, 64]
    assert all(torch.isfinite(scale).all() for scale in tuned.scales)


def test_a_loss_that_is_not_finite_is_said() -> None:
    _, net, scales, x = small_net()
    items = [(row * float("nan"), 0) for row in x]
    with pytest.raises(ValueError, match=r"the loss of the fine-tuning is nan at step 0"):
        fine_tuned(
            Calibrated(net=net, scales=scales), 4, data=items, teacher=lambda some: computed(net, some), examples=64
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.thorough
def test_training_brings_the_spiking_net_nearer_to_what_it_is_to_compute(reset: Reset) -> None:
    _, net, scales, _ = small_net()
    like = Neurons(name="", shape=(), threshold=torch.ones(()), reset=reset)
    x = torch.rand(128, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    items = [(row, 0) for row in x[:96]]

    def teacher(some: Tensor) -> list[Tensor]:
        return [1.5 * outputs for outputs in computed(net, some)]

    def apart(net: RateNet, scales: tuple[Tensor, ...]) -> float:
        found = spiking_activations(net, list(scales), 6, x[96:], like=like)
        both = zip(found, teacher(x[96:]), strict=True)
        return sum(float((own - other).detach().square().mean()) for own, other in both)

    start = Calibrated(net=net, scales=tuple(1.5 * scale for scale in scales))
    tuned = fine_tuned(start, 6, data=items, teacher=teacher, examples=64 * 80, like=like)  # type: ignore[arg-type]
    assert apart(tuned.net, tuned.scales) < 0.8 * apart(net, start.scales)
