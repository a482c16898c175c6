"""Thresholds and biases of a spiking net, found layer by layer by what its neurons fire for calibration examples.

For each layer in turn the spikes of the layers before it are known. Of several scales for each channel, multiples of a
high percentile of its activations, the one is taken whose rates are nearest to the activations of the net itself, in
the mean of squares; for each of them a constant current for each channel is found that makes the mean rate right. (The
threshold search and the correction of biases of Li et al., "A free lunch from ANN", ICML 2021, with spikes as they
come instead of a model of them.)

The biases hold what is found, so that readers of the file need know nothing of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apportion.exporting.spiking.conversion.rate_net import INPUT, RateNet, Stage, applied, computed, per_channel
from apportion.exporting.spiking.graph import Neurons, Reset
from apportion.exporting.spiking.simulator import fired

PERCENTILE = 0.9995
"""The percentile of the activations of a channel that its scales are multiples of."""
MULTIPLES = (1.0, 0.85, 0.7, 0.57, 0.45, 0.35)
CORRECTIONS = 3
"""How often the mean rate is corrected."""
EXAMPLES = 128
"""The largest number of calibration examples that are looked at."""
MOST = 2**26
"""The largest number of currents of a layer, over all steps, that is held at once: examples are fewer where it is
reached."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibrated:
    """A net with corrected biases, and the scale of each channel of each of its stages but the last."""

    net: RateNet
    scales: tuple[Tensor, ...]


def percentiles(net: RateNet, x: Tensor, *, share: float = PERCENTILE) -> tuple[Tensor, ...]:
    """For each stage but the last this percentile of the activations of each channel, no larger than the ceiling."""
    with torch.no_grad():
        found = computed(net, x)[:-1]
    return tuple(_percentile(stage, a, share) for stage, a in zip(net.stages, found, strict=False))


def _percentile(stage: Stage, activations: Tensor, share: float) -> Tensor:
    rows = activations.transpose(0, 1).flatten(1)
    count = max(1, round((1 - share) * rows.shape[1]))
    scale = rows.topk(min(count, rows.shape[1]), dim=1).values[:, -1]
    most = rows.max()
    least = most * 1e-2 if most > 0 else torch.ones_like(most)
    scale = torch.maximum(scale, least)  # a channel that is nearly silent must not fire at noise
    return scale.clamp(max=stage.ceiling) if stage.ceiling is not None else scale


@torch.no_grad()
def calibrated(
    net: RateNet, x: Tensor, timesteps: int, *, reset: Reset = "subtract", strictly: bool = False
) -> Calibrated:
    """Find scales and corrections of biases for this number of steps and this rule of neurons; ``x``: calibration
    examples, of which fewer are taken where the currents of a layer would fill the memory."""
    largest = max(math.prod(stage.shape) for stage in net.stages)
    x = x[: max(8, min(EXAMPLES, MOST // (largest * timesteps)))]
    wanted = computed(net, x)
    starts = percentiles(net, x)
    trains: dict[int, Tensor] = {}
    stages: list[Stage] = []
    scales: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        currents = _currents(stage, x, trains, scales, timesteps)
        if number == len(net.stages) - 1:
            off = (wanted[number] - currents.mean(0)).mean(0)
            per_bias = off.flatten(1).mean(1) if off.ndim > 1 else off  # maps have a bias for each channel
            stages.append(replace(stage, bias=stage.bias + per_bias))
            break
        one = torch.ones(())
        neurons = Neurons(name=stage.name, shape=stage.shape, threshold=one, reset=reset, strictly=strictly)
        layer = _SpikingLayer(wanted=wanted[number], neurons=neurons, currents=currents)
        scale, correction = layer.best(starts[number])
        trains[number] = torch.stack([spikes.to(torch.uint8) for spikes in layer.fired(scale, correction)])
        stages.append(replace(stage, bias=stage.bias + correction))
        scales.append(scale)
        for old in [n for n in trains if not any(to > number for to in net.consumers(n))]:
            del trains[old]
    return Calibrated(net=replace(net, stages=tuple(stages)), scales=tuple(scales))


def _currents(stage: Stage, x: Tensor, trains: dict[int, Tensor], scales: Sequence[Tensor], steps: int) -> Tensor:
    """The stage's z in each step: (steps, examples, *shape)."""
    bias = per_channel(stage.bias, len(stage.shape))
    constant = torch.zeros(()) + bias
    for term in stage.terms:
        if term.source == INPUT:
            constant = constant + applied(term.maps, x)
    found = torch.empty(steps, len(x), *stage.shape)
    for t in range(steps):
        total = constant
        for term in stage.terms:
            if term.source != INPUT:
                spikes = trains[term.source][t]
                total = total + applied(term.maps, spikes * per_channel(scales[term.source], spikes.ndim - 1))
        found[t] = total
    return found


@dataclass(eq=False, kw_only=True)
class ScaleSearch(ABC):
    """The search for the scales of a layer."""

    wanted: Tensor
    """The activations of the net itself: (examples, *shape)."""

    @abstractmethod
    def rates(self, scale: Tensor, correction: Tensor) -> Tensor:
        """What the layer gives instead, with this scale and this addition to the bias of each channel."""

    def best(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, correction) of each channel."""
        best = torch.full_like(start, torch.inf)
        scale, correction, begun = start, torch.zeros_like(start), torch.zeros_like(start)
        for multiple in MULTIPLES:
            tried = start * multiple
            error, begun = self._corrected(tried, begun)
            better = error < best
            best = torch.where(better, error, best)
            scale, correction = torch.where(better, tried, scale), torch.where(better, begun, correction)
        return scale, correction

    def _corrected(self, scale: Tensor, begun: Tensor) -> tuple[Tensor, Tensor]:
        """(the mean squared error of each channel, the correction that has it)."""
        others = [d for d in range(self.wanted.ndim) if d != 1]
        best = torch.full_like(scale, torch.inf)
        kept, now = begun, begun
        for _ in range(CORRECTIONS):
            off = self.wanted - self.rates(scale, now)
            error = off.square().mean(others)
            better = error < best
            best, kept = torch.where(better, error, best), torch.where(better, now, kept)
            # A fixed-point iteration: the rate is not linear in the bias where neurons saturate, and an unlimited step
            # could overshoot. The best correction so far is kept.
            now = now + off.mean(others).clamp(-scale / 4, scale / 4)
        return best, kept


@dataclass(eq=False, kw_only=True)
class _SpikingLayer(ScaleSearch):
    """A layer of neurons whose currents are known."""

    neurons: Neurons
    currents: Tensor
    """(steps, examples, *shape)."""

    def rates(self, scale: Tensor, correction: Tensor) -> Tensor:
        """scale * spikes / steps of each neuron."""
        count = torch.zeros_like(self.wanted)
        for spikes in self.fired(scale, correction):
            count += spikes
        return count.mul_(per_channel(scale, count.ndim - 1) / len(self.currents))

    def fired(self, scale: Tensor, correction: Tensor) -> Iterator[Tensor]:
        """The spikes of each step."""
        neurons = replace(self.neurons, threshold=scale)
        # Half a threshold over all steps, as ``assembled`` adds it: it rounds the count of spikes.
        each = per_channel(correction + scale / (2 * len(self.currents)), self.wanted.ndim - 1)
        return fired(neurons, self.currents, each)
