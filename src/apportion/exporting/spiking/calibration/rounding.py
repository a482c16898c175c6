"""Scales of activations that are rounded to a few levels, found layer by layer as those of spikes are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apportion.exporting.spiking.calibration.calibrate import EXAMPLES, Calibrated, ScaleSearch, percentiles
from apportion.exporting.spiking.conversion.rate_net import INPUT, RateNet, computed, summed


@torch.no_grad()
def rounded(net: RateNet, x: Tensor, *, levels: int) -> Calibrated:
    """Find for each channel the scale, the activation of the highest level, whose rounded activations are nearest to
    those of the net, and correct the biases; ``x``: calibration examples."""
    x = x[:EXAMPLES]
    wanted, starts = computed(net, x), percentiles(net, x)
    found: list[Tensor] = []
    scales: list[Tensor] = []
    stages = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else found[source])
        if number == len(net.stages) - 1:
            stages.append(replace(stage, bias=stage.bias + (wanted[number] - z).mean(0)))
            break
        layer = _RoundedLayer(wanted=wanted[number], z=z, levels=levels)
        scale, correction = layer.best(starts[number])
        found.append(layer.rates(scale, correction))
        stages.append(replace(stage, bias=stage.bias + correction))
        scales.append(scale)
    return Calibrated(net=replace(net, stages=tuple(stages)), scales=tuple(scales))


@dataclass(eq=False, kw_only=True)
class _RoundedLayer(ScaleSearch):
    """A layer whose activations are rounded."""

    z: Tensor
    levels: int

    def rates(self, scale: Tensor, correction: Tensor) -> Tensor:
        """The rounded activations."""
        shape = (-1, *[1] * (self.z.ndim - 2))
        step = (scale / self.levels).reshape(shape)
        return ((self.z + correction.reshape(shape)) / step + 0.5).floor_().clamp_(0, self.levels).mul_(step)
