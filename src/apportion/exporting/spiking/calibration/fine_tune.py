"""A short training by which a net computes well in few steps: its neurons fire as they will.

The forward pass is the simulation of all steps, the backward pass runs through them in time (``surrogate``): what a
layer does in the first steps, before the layers before it have fired, counts as it will on the chip. A rounded
activation that stands for the neurons' counts (clip-floor-shift, Bu et al., ICLR 2022) knows nothing of that: a
ResNet-20 for 8 steps that was trained with it first was no better once it fired. What is learned are the outputs of the
net itself on training inputs, softened (Hinton et al., 2015), and the activations of its stages: no labels are read.

The spikes of a layer over all steps, as a function that has a gradient.

A neuron adds v to what flows in and fires where v has reached the threshold. Forwards the rule is that of the
simulator. Backwards the step function has the slope a / threshold, where a is a triangle around the threshold as wide
as the threshold on each side (Esser et al., 2016), and time runs from the last step to the first (Neftci et al.,
2019)::

    x[t] = (1 - a[t]) x[t + 1] + a[t] g[t]        x: the gradient of what flows in; g: that of threshold * spikes

So what flows in too late to fire has no gradient, and what has flowed in for long has that of the activation which the
neurons stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from apportion.core.torch_private import pytree
from apportion.exporting.spiking.calibration.calibrate import Calibrated
from apportion.exporting.spiking.conversion.rate_net import (
    INPUT,
    FlattenMap,
    LinearMap,
    RateNet,
    RateTerm,
    Stage,
    applied,
    per_channel,
    summed,
    with_weight,
)
from apportion.exporting.spiking.graph import Neurons
from apportion.exporting.spiking.simulator import Membranes


def spike_train(neurons: Neurons, moving: Tensor | None, each: Tensor, steps: int) -> Tensor:
    """threshold * spikes, (steps * examples, *shape), the first step first; differentiable by all three tensors.

    ``neurons``: their threshold has one number for each channel; ``moving``: what spikes cause in each step,
    (steps * examples, *shape), None where there are no spikes before; ``each``: what flows in every step besides,
    (examples, *shape).
    """
    scale = neurons.threshold.reshape(-1, *[1] * (each.ndim - 2))
    train: Tensor = _SpikeTrain.apply(neurons, moving, each, scale, steps)
    return train


class _SpikeTrain(torch.autograd.Function):
    """The function that ``spike_train`` applies."""

    @staticmethod
    def forward(ctx: Any, neurons: Neurons, moving: Tensor | None, each: Tensor, scale: Tensor, steps: int) -> Tensor:
        """Run all steps, and keep the membranes as they were before the neurons fired."""
        layout = torch.channels_last if each.ndim == 4 else torch.contiguous_format
        train = torch.empty((steps * len(each), *each.shape[1:]), dtype=each.dtype, memory_format=layout)
        before = torch.empty_like(train)
        state = Membranes.at_rest(neurons, train[: len(each)])
        flows = [None] * steps if moving is None else moving.split(len(each))
        for flow, reached, out in zip(flows, before.split(len(each)), train.split(len(each)), strict=True):
            state.v += each
            if flow is not None:
                state.v += flow
            reached.copy_(state.v)
            torch.mul(state.step(None), scale, out=out)
        ctx.save_for_backward(before, train, scale)
        ctx.reset, ctx.steps, ctx.moves = neurons.reset, steps, moving is not None
        return train

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Run the steps backwards."""
        before, train, scale = ctx.saved_tensors
        count = len(before) // ctx.steps
        gradient = torch.empty_like(before)
        later = torch.zeros_like(before[:count])
        of_each, of_scale = torch.zeros_like(later), torch.zeros_like(later)
        parts = zip(*(x.split(count) for x in (before, train, grads[0], gradient)), strict=True)
        for v, spikes, g, flow in reversed(list(parts)):
            share = v / scale
            slope = _slope(share, ctx.reset)
            if ctx.reset == "zero":  # where it begins anew does not depend on how much there was
                pull = g
                torch.mul(later, spikes == 0, out=flow)
            else:
                pull = g - later
                flow.copy_(later)
            flow.addcmul_(slope, pull)
            # The threshold moves what it lets out, and where it is: d(scale * spikes) / d(scale).
            of_scale += pull * (spikes / scale - slope * share)
            if ctx.reset == "subtract_clipped_multi":
                # Below minus the threshold the membrane was clipped: what had flowed in before has no effect on later
                # steps.
                flow *= share > -1
            later = flow
            of_each += flow
        others = [d for d in range(of_scale.ndim) if d != 1]
        total = of_scale.sum(others).reshape(scale.shape)
        return None, gradient if ctx.moves else None, of_each, total, None


def _slope(share: Tensor, reset: str) -> Tensor:
    """a of membranes in units of the threshold."""
    if reset == "subtract_clipped_multi":  # the number of spikes has no largest value
        return share.clamp(0, 1)
    return (1 - (share - 1).abs_()).clamp_(min=0)


TEMPERATURE = 2.0
"""What the outputs are divided by before they become probabilities."""
RATE = 2e-3
"""The largest learning rate of Adam, as a share of the root mean square of each tensor that is trained: that of two
layers may differ by a factor of a hundred. It falls to 0 as a cosine."""
WARM_UP = 0.1
"""The share of the steps in which the learning rate rises to it."""
SILENT = 1e-9
"""The least mean square of a stage's activations: one may be silent for all examples of a part."""
FEATURES = 1.0
"""The weight of the activations' distance beside that of the outputs."""
BATCH = 64
SUBTRACT = Neurons(name="", shape=(), threshold=torch.ones(()))
AT_ONCE = 16
"""The number of examples whose gradient is found at once: what a layer keeps of all steps stays in a cache."""


def fine_tuned(  # noqa: PLR0913 (each is a separate part of the training)
    start: Calibrated,
    timesteps: int,
    *,
    data: Dataset[Any],
    collate: Callable[[list[Any]], Any] = default_collate,
    teacher: Callable[[Tensor], Sequence[Tensor]],
    examples: int,
    like: Neurons = SUBTRACT,
) -> Calibrated:
    """Train a copy of the net on ``examples`` examples; ``data``: items, of which ``collate`` makes (inputs, targets);
    ``teacher``: inputs -> what is to be learned, the activations of all stages and the outputs, or the outputs alone;
    ``like``: neurons with the rule of those that will fire. Raises ValueError where the loss is not finite."""
    net, trained = _trainable(start.net)
    logs = [scale.log().detach().requires_grad_() for scale in start.scales]
    sizes = [*(float(x.detach().square().mean().sqrt()) or 1.0 for x in trained), *[1.0] * len(logs)]
    optimizer = torch.optim.Adam([{"params": [x]} for x in (*trained, *logs)])
    steps = math.ceil(examples / BATCH)
    for step, x in enumerate(_batches(data, collate, steps)):
        share = min(1, (step + 1) / (WARM_UP * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
        for group, size in zip(optimizer.param_groups, sizes, strict=True):
            group["lr"] = RATE * share * size
        optimizer.zero_grad()
        for part in x.split(AT_ONCE):
            found = spiking_activations(net, [log.exp() for log in logs], timesteps, part, like=like)
            with torch.no_grad():
                wanted = teacher(part)
            loss = _distance(found, wanted) * (len(part) / len(x))
            if not torch.isfinite(loss):
                raise ValueError(
                    f"the loss of the fine-tuning is {loss.item()} at step {step}: look for numbers in the training "
                    "data that are not finite, or leave fine_tune_examples out"
                )
            loss.backward()
        optimizer.step()
    return Calibrated(net=_frozen(net), scales=tuple(log.detach().exp() for log in logs))


def spiking_activations(
    net: RateNet, scales: list[Tensor], steps: int, x: Tensor, *, like: Neurons = SUBTRACT
) -> list[Tensor]:
    """The rates of all stages and the readout of the spiking net; ``like``: neurons with the rule of those that
    fire."""
    rates: list[Tensor] = []
    trains: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        if number == len(net.stages) - 1:
            return [*rates, summed(stage, lambda source: x if source == INPUT else rates[source])]
        moving, constant = _currents(stage, x, trains)
        neurons = replace(like, name=stage.name, shape=stage.shape, threshold=scales[number])
        each = constant + per_channel(scales[number], len(stage.shape)) / (2 * steps)
        trains.append(spike_train(neurons, moving, each.expand(len(x), *stage.shape), steps))
        rates.append(trains[-1].unflatten(0, (steps, len(x))).mean(0))
    raise AssertionError("a net has a readout")


def _currents(stage: Stage, x: Tensor, trains: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """(what spikes cause in each step, (steps * examples, *shape), None where there are no spikes before the stage;
    what flows in every step besides)."""
    constant: Tensor = per_channel(stage.bias, len(stage.shape))
    moving: Tensor | None = None
    for term in stage.terms:
        if term.source == INPUT:
            constant = constant + applied(term.maps, x)
        else:
            flow = applied(term.maps, trains[term.source])
            moving = flow if moving is None else moving + flow
    return moving, constant


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """The distance of the outputs, and of the activations in units of their own squares where they are wanted."""
    total = _apart(found[-1], wanted[-1])
    for own, other in zip(found[:-1], wanted[:-1], strict=False):
        size = other.square().mean().clamp(min=SILENT)
        total = total + FEATURES / (len(found) - 1) * functional.mse_loss(own, other) / size
    return total


def _apart(found: Tensor, wanted: Tensor) -> Tensor:
    if found.ndim == 2 and found.shape[1] > 1:
        soft = functional.softmax(wanted / TEMPERATURE, dim=1)
        return -(soft * functional.log_softmax(found / TEMPERATURE, dim=1)).sum(1).mean()
    return functional.mse_loss(found, wanted)


def _batches(data: Dataset[Any], collate: Callable[[list[Any]], Any], steps: int) -> Iterator[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    count = len(data)  # type: ignore[arg-type]
    rows: list[int] = []
    for _ in range(steps):
        while len(rows) < BATCH:
            rows += torch.randperm(count, generator=drawn).tolist()
        x = pytree.tree_leaves(collate([data[n] for n in rows[:BATCH]])[0])[0].float()
        yield x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        rows = rows[BATCH:]


def _trainable(net: RateNet) -> tuple[RateNet, list[Tensor]]:
    """A float32 copy whose weights and biases have gradients, but those of pools and the like."""
    trained: list[Tensor] = []

    def own(x: Tensor) -> Tensor:
        trained.append(x.detach().float().clone().requires_grad_())
        return trained[-1]

    def mapped(one: LinearMap) -> LinearMap:
        if isinstance(one, FlattenMap):
            return one
        return replace(one, weight=one.weight.float() if one.fixed else own(one.weight))

    def termed(term: RateTerm) -> RateTerm:
        return replace(term, maps=tuple(map(mapped, term.maps)))

    stages = tuple(replace(stage, terms=tuple(map(termed, stage.terms)), bias=own(stage.bias)) for stage in net.stages)
    return replace(net, stages=stages), trained


def _frozen(net: RateNet) -> RateNet:
    def mapped(one: LinearMap) -> LinearMap:
        return with_weight(one, Tensor.detach)

    return replace(
        net,
        stages=tuple(
            replace(
                stage,
                bias=stage.bias.detach(),
                terms=tuple(replace(term, maps=tuple(map(mapped, term.maps))) for term in stage.terms),
            )
            for stage in net.stages
        ),
    )
