"""A short training by which a net computes well in few steps: first with quantised activations, then with its spikes.

The first part trains with the activation that neurons have after T steps if their currents are even, scale *
clip(floor(z T / scale + 1/2) / T, 0, 1) (clip-floor-shift, Bu et al., ICLR 2022). In few steps currents are not even,
so the second part takes the counts that neurons really fire: forwards each stage gives scale * count / T, backwards it
is the clipped rectifier (tandem learning, Wu et al., 2021). Both parts learn the outputs of the net itself on training
inputs, softened (Hinton et al., 2015): no labels are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from apportion.exporting.spiking.conversion.linear_maps import FlattenMap, LinearMap, applied, with_weight
from apportion.exporting.spiking.conversion.rate_net import INPUT, RateNet, RateTerm, Stage, summed
from apportion.exporting.spiking.graph import Neurons
from apportion.exporting.spiking.membranes import fired

TEMPERATURE = 2.0
"""What the outputs are divided by before they become probabilities."""
RATE = 2e-4
"""The largest learning rate of Adam, which is reached after ``WARM_UP`` steps and falls to 0 as a cosine."""
WARM_UP = 8
FEATURES = 1.0
"""The weight of the activations' distance beside that of the outputs."""
BATCH = 64
SUBTRACT = Neurons(name="", shape=(), threshold=torch.ones(()))
AT_ONCE = 16
"""The number of examples whose spikes are found at once: those of all steps of a layer stay in a cache."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long to train, in examples."""

    quantized: int
    """With the quantised activation."""
    spiking: int
    """With the counts of spikes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tuned:
    """A net with trained weights and scales, float32."""

    net: RateNet
    scales: tuple[Tensor, ...]


def fine_tuned(
    net: RateNet,
    scales: tuple[Tensor, ...],
    timesteps: int,
    *,
    data: Dataset[Any],
    teacher: Callable[[Tensor], Sequence[Tensor]],
    schedule: Schedule,
    like: Neurons = SUBTRACT,
) -> Tuned:
    """Train a copy of the net; ``data``: items (inputs, targets); ``teacher``: inputs -> what is to be learned, the
    activations of all stages and the outputs, or the outputs alone; ``like``: neurons with the rule of those that will
    fire."""
    net, trained = _trainable(net)
    logs = [scale.log().detach().requires_grad_() for scale in scales]
    for count, spiking in ((schedule.quantized, False), (schedule.spiking, True)):
        steps = math.ceil(count / BATCH)
        optimizer = torch.optim.Adam([*trained, *logs], lr=RATE)
        for step, x in enumerate(_batches(data, steps, seed=int(spiking))):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
            now = [log.exp() for log in logs]
            if spiking:
                found = spiking_activations(net, now, timesteps, x, like=like)
            else:
                found = quantized_activations(net, now, timesteps, x)
            with torch.no_grad():
                wanted = teacher(x)
            loss = _distance(found, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Tuned(net=_frozen(net), scales=tuple(log.detach().exp() for log in logs))


def quantized_activations(net: RateNet, scales: list[Tensor], steps: int, x: Tensor) -> list[Tensor]:
    """The activations of all stages and the readout of the net with the clip-floor-shift activation."""
    found: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else found[source])
        if number == len(net.stages) - 1:
            return [*found, z]
        scale = _over(scales[number], z.ndim - 1)
        share = (z / scale).clamp(0, 1)
        counted = torch.floor(share.detach() * steps + 0.5) / steps
        found.append(scale * (counted + share - share.detach()))
    raise AssertionError("a net has a readout")


def spiking_activations(
    net: RateNet, scales: list[Tensor], steps: int, x: Tensor, *, like: Neurons = SUBTRACT
) -> list[Tensor]:
    """The rates of all stages and the readout of the spiking net, with the gradient of the clipped rectifier; ``like``:
    neurons with the rule of those that fire."""
    with torch.no_grad():
        parts = [_fired_rates(net, scales, steps, part, like) for part in x.split(AT_ONCE)]
        found = [torch.cat(rates) for rates in zip(*parts, strict=True)]
    rates: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else rates[source])
        if number == len(net.stages) - 1:
            return [*rates, z]
        passed = torch.minimum(z.clamp(min=0), _over(scales[number], z.ndim - 1))
        rates.append(found[number] + passed - passed.detach())
    raise AssertionError("a net has a readout")


def _fired_rates(net: RateNet, scales: list[Tensor], steps: int, x: Tensor, like: Neurons) -> list[Tensor]:
    """scale * count / steps of the neurons of every stage but the readout."""
    rates: list[Tensor] = []
    trains: list[Tensor] = []
    for stage, scale in zip(net.stages, scales, strict=False):
        moving, constant = _currents(stage, x, trains)
        neurons = replace(like, name=stage.name, shape=stage.shape, threshold=scale)
        train, rate = _fired(neurons, moving, constant, steps, examples=len(x))
        trains.append(train)
        rates.append(rate)
    return rates


def _currents(stage: Stage, x: Tensor, trains: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """(what spikes cause in each step, (steps * examples, *shape), None where there are no spikes before the stage;
    what flows in every step besides)."""
    constant: Tensor = _over(stage.bias, len(stage.shape))
    moving: Tensor | None = None
    for term in stage.terms:
        if term.source == INPUT:
            constant = constant + applied(term.maps, x)
        else:
            flow = applied(term.maps, trains[term.source])
            moving = flow if moving is None else moving + flow
    return moving, constant


def _fired(
    neurons: Neurons, moving: Tensor | None, constant: Tensor, steps: int, *, examples: int
) -> tuple[Tensor, Tensor]:
    """(threshold times the spikes, (steps * examples, *shape); threshold * count / steps)."""
    scale = _over(neurons.threshold, len(neurons.shape))
    each = (constant + scale / (2 * steps)).expand(examples, *neurons.shape)
    currents = [torch.zeros_like(each)] * steps if moving is None else moving.split(examples)
    layout = torch.channels_last if each.ndim == 4 else torch.contiguous_format
    train = torch.empty((steps * examples, *neurons.shape), memory_format=layout)
    count = torch.zeros_like(train[:examples])
    for flow, spikes in zip(train.split(examples), fired(neurons, currents, each), strict=True):
        count += torch.mul(spikes, scale, out=flow)
    return train, count / steps


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """The distance of the outputs, and of the activations in units of their own squares where they are wanted."""
    total = _apart(found[-1], wanted[-1])
    for own, other in zip(found[:-1], wanted[:-1], strict=False):
        total = total + FEATURES / (len(found) - 1) * functional.mse_loss(own, other) / other.square().mean()
    return total


def _apart(found: Tensor, wanted: Tensor) -> Tensor:
    if found.ndim == 2 and found.shape[1] > 1:
        soft = functional.softmax(wanted / TEMPERATURE, dim=1)
        return -(soft * functional.log_softmax(found / TEMPERATURE, dim=1)).sum(1).mean()
    return functional.mse_loss(found, wanted)


def _over(channels: Tensor, dimensions: int) -> Tensor:
    return channels.reshape(-1, *[1] * (dimensions - 1))


def _batches(data: Dataset[Any], steps: int, *, seed: int) -> Iterator[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    count = len(data)  # type: ignore[arg-type]
    rows: list[int] = []
    for _ in range(steps):
        while len(rows) < BATCH:
            rows += torch.randperm(count, generator=drawn).tolist()
        x = torch.stack([torch.as_tensor(data[n][0]) for n in rows[:BATCH]]).float()
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
