"""A short training by which a net computes well in few steps: first with quantised activations, then with its spikes.

The first part trains with the activation that neurons have after T steps if their currents are even, scale *
clip(floor(z T / scale + 1/2) / T, 0, 1) (clip-floor-shift, Bu et al., ICLR 2022). In few steps currents are not even,
so the second part takes the counts that neurons really fire: forwards each stage gives scale * count / T, backwards it
is the clipped rectifier (tandem learning, Wu et al., 2021). Both parts learn the outputs of the net itself on training
inputs, softened (Hinton et al., 2015): no labels are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from apportion.exporting.spiking.linear_maps import LinearMap, applied
from apportion.exporting.spiking.rate_net import INPUT, RateNet, Stage, Term, summed

TEMPERATURE = 2.0
"""What the outputs are divided by before they become probabilities."""
RATE = 5e-4
"""The learning rate of Adam at the beginning; it falls to 0 as a cosine."""
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
    teacher: Callable[[Tensor], Tensor],
    schedule: Schedule,
) -> Tuned:
    """Train a copy of the net; ``data``: items (inputs, targets); ``teacher``: inputs -> the outputs to be learned."""
    net, trained = _trainable(net)
    logs = [scale.log().detach().requires_grad_() for scale in scales]
    for count, spiking in ((schedule.quantized, False), (schedule.spiking, True)):
        steps = math.ceil(count / BATCH)
        parameters = trained if spiking else [*trained, *logs]
        optimizer = torch.optim.Adam(parameters, lr=RATE)
        for step, x in enumerate(_batches(data, steps, seed=int(spiking))):
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
            now = [log.exp() for log in logs]
            if spiking:
                found = spiking_outputs(net, [scale.detach() for scale in now], timesteps, x)
            else:
                found = quantized_outputs(net, now, timesteps, x)
            with torch.no_grad():
                wanted = teacher(x)
            loss = _distance(found, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Tuned(net=_frozen(net), scales=tuple(log.detach().exp() for log in logs))


def quantized_outputs(net: RateNet, scales: list[Tensor], steps: int, x: Tensor) -> Tensor:
    """The readout of the net with the clip-floor-shift activation, with a gradient."""
    found: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else found[source])
        if number == len(net.stages) - 1:
            return z
        scale = _over(scales[number], z.ndim - 1)
        share = (z / scale).clamp(0, 1)
        counted = torch.floor(share.detach() * steps + 0.5) / steps
        found.append(scale * (counted + share - share.detach()))
    raise AssertionError("a net has a readout")


def spiking_outputs(net: RateNet, scales: list[Tensor], steps: int, x: Tensor) -> Tensor:
    """The readout of the spiking net after so many steps, with the gradient of the clipped rectifier."""
    rates: list[Tensor] = []
    trains: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else rates[source])
        if number == len(net.stages) - 1:
            return z
        scale = _over(scales[number], z.ndim - 1)
        with torch.no_grad():
            train = _spikes(stage, scale, steps, _currents(stage, x, trains, scales, steps))
            rate = train.sum(0) * (scale / steps)
        trains.append(train)
        passed = torch.minimum(z.clamp(min=0), scale)
        rates.append(rate + passed - passed.detach())
    raise AssertionError("a net has a readout")


def _currents(stage: Stage, x: Tensor, trains: list[Tensor], scales: list[Tensor], steps: int) -> Tensor:
    """(steps or 1, examples, *shape)."""
    total = _over(stage.bias, len(stage.shape))[None, None]
    for term in stage.terms:
        if term.source == INPUT:
            total = total + applied(term.maps, x)[None]
        else:
            train = trains[term.source] * _over(scales[term.source], trains[term.source].ndim - 2)
            total = total + applied(term.maps, train.flatten(0, 1)).unflatten(0, train.shape[:2])
    return total


def _spikes(stage: Stage, scale: Tensor, steps: int, currents: Tensor) -> Tensor:
    v = torch.zeros_like(currents[0])
    found = torch.empty(steps, *v.shape)
    for t in range(steps):
        v += currents[t if len(currents) > 1 else 0]
        v += scale / (2 * steps)
        torch.ge(v, scale, out=found[t])
        v.addcmul_(found[t], scale.expand_as(v), value=-1)
    return found


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
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
        yield torch.stack([torch.as_tensor(data[n][0]) for n in rows[:BATCH]]).float()
        rows = rows[BATCH:]


def _trainable(net: RateNet) -> tuple[RateNet, list[Tensor]]:
    """A float32 copy whose weights and biases have gradients, but those of pools and the like."""
    trained: list[Tensor] = []

    def own(x: Tensor) -> Tensor:
        trained.append(x.detach().float().clone().requires_grad_())
        return trained[-1]

    def mapped(one: LinearMap) -> LinearMap:
        if not hasattr(one, "weight"):
            return one
        return replace(one, weight=one.weight.float() if one.fixed else own(one.weight))

    def termed(term: Term) -> Term:
        return replace(term, maps=tuple(map(mapped, term.maps)))

    stages = tuple(replace(stage, terms=tuple(map(termed, stage.terms)), bias=own(stage.bias)) for stage in net.stages)
    return replace(net, stages=stages), trained


def _frozen(net: RateNet) -> RateNet:
    def mapped(one: LinearMap) -> LinearMap:
        return replace(one, weight=one.weight.detach()) if hasattr(one, "weight") else one

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
