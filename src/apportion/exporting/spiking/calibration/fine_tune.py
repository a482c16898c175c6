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

TEMPERATURE = 2.0
"""What the outputs are divided by before they become probabilities."""
RATE = 2e-4
"""The largest learning rate of Adam, which is reached after ``WARM_UP`` steps and falls to 0 as a cosine."""
WARM_UP = 8
FEATURES = 1.0
"""The weight of the activations' distance beside that of the outputs."""
BATCH = 64


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
) -> Tuned:
    """Train a copy of the net; ``data``: items (inputs, targets); ``teacher``: inputs -> what is to be learned, the
    activations of all stages and the outputs, or the outputs alone."""
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
                found = spiking_activations(net, now, timesteps, x)
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


def spiking_activations(net: RateNet, scales: list[Tensor], steps: int, x: Tensor) -> list[Tensor]:
    """The rates of all stages and the readout of the spiking net, with the gradient of the clipped rectifier."""
    rates: list[Tensor] = []
    trains: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else rates[source])
        if number == len(net.stages) - 1:
            return [*rates, z]
        scale = _over(scales[number], z.ndim - 1)
        with torch.no_grad():
            train, rate = _fired(scale, _currents(stage, x, trains).split(len(x)), steps)
        trains.append(train)
        passed = torch.minimum(z.clamp(min=0), scale)
        rates.append(rate + passed - passed.detach())
    raise AssertionError("a net has a readout")


def _currents(stage: Stage, x: Tensor, trains: list[Tensor]) -> Tensor:
    """What flows in each step: (steps * examples, *shape), or (examples, *shape) where it is always the same."""
    constant: Tensor = _over(stage.bias, len(stage.shape))
    moving: Tensor | None = None
    for term in stage.terms:
        if term.source == INPUT:
            constant = constant + applied(term.maps, x)
        else:
            flow = applied(term.maps, trains[term.source])
            moving = flow if moving is None else moving + flow
    if moving is None:
        return constant
    if constant.shape[0] != len(x):
        return moving + constant
    steps: Tensor = moving.unflatten(0, (-1, len(x))) + constant
    return steps.flatten(0, 1)


def _fired(scale: Tensor, currents: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """(scale times the spikes, (steps * examples, *shape); scale * count / steps); ``currents``: of each step, or one
    for all of them."""
    v, count = torch.zeros_like(currents[0]), torch.zeros_like(currents[0])
    train = torch.empty_like(torch.cat([v] * steps))
    for spikes, t in zip(train.split(len(v)), range(steps), strict=True):
        v += currents[t if len(currents) > 1 else 0]
        v += scale / (2 * steps)
        torch.ge(v, scale, out=spikes)
        spikes *= scale
        v -= spikes
        count += spikes
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
