"""A trained net as stages: sums of linear paths, each followed by a rectifier, which neurons will stand for.

A stage's activation a = clip(z, 0, ceiling) of z = sum of maps(activation of an earlier stage) + bias becomes the rate
at which neurons fire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apportion.exporting.spiking.conversion.linear_maps import Maps, Shape, applied, with_weight

INPUT = -1
"""The number of the stage that the inputs themselves stand for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RateTerm:
    """One linear path into a stage."""

    source: int
    """The number of the stage that it begins at, or ``INPUT``."""
    maps: Maps = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage:
    """A sum of linear paths and what is made of it."""

    name: str
    """The layer's name in the net."""
    shape: Shape
    """The shape of an example that comes out."""
    terms: tuple[RateTerm, ...]
    bias: Tensor
    """One number for each channel, dimension 0 of ``shape``."""
    ceiling: float | None = None
    """The largest activation, as that of ReLU6; None: there is none."""
    layers: str = ""
    """The layers with weights that the paths go through, with their types."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RateNet:
    """The stages in topological order; the last one is the readout, which has no rectifier. Tensors are float64."""

    shape: Shape
    """The shape of an example that goes in."""
    stages: tuple[Stage, ...]

    def to(self, dtype: torch.dtype) -> RateNet:
        """The same net with its tensors in this floating type."""
        return replace(self, stages=tuple(_cast(stage, dtype) for stage in self.stages))

    def consumers(self, number: int) -> list[int]:
        """The numbers of the stages with a path that begins at this one."""
        return [to for to, stage in enumerate(self.stages) if any(term.source == number for term in stage.terms)]


Activation = Callable[[int, Tensor], Tensor]
"""(number of the stage, z) -> activation."""


def summed(stage: Stage, sources: Callable[[int], Tensor]) -> Tensor:
    """The stage's z from what its paths begin at."""
    total = per_channel(stage.bias, len(stage.shape))
    for term in stage.terms:
        total = applied(term.maps, sources(term.source)) + total
    return total


def rectified(stage: Stage, z: Tensor) -> Tensor:
    """The stage's activation in the net itself."""
    return z.clamp(min=0, max=stage.ceiling)


def computed(net: RateNet, x: Tensor, activation: Activation | None = None) -> list[Tensor]:
    """The activations of all stages, and last the readout's z; ``activation``: instead of the net's own."""
    found: list[Tensor] = []
    for number, stage in enumerate(net.stages):
        z = summed(stage, lambda source: x if source == INPUT else found[source])
        if number == len(net.stages) - 1:
            found.append(z)
        else:
            found.append(rectified(stage, z) if activation is None else activation(number, z))
    return found


def outputs(net: RateNet, batches: Sequence[Tensor], activation: Activation | None = None) -> Tensor:
    """The readout of all the batches, one after another."""
    with torch.no_grad():
        return torch.cat([computed(net, x, activation)[-1] for x in batches])


def per_channel(channels: Tensor, dimensions: int) -> Tensor:
    """Numbers of channels in the shape in which they meet examples of these ``dimensions``: (channels, 1, ...)."""
    return channels.reshape(-1, *[1] * (dimensions - 1))


def _cast(stage: Stage, dtype: torch.dtype) -> Stage:
    def cast(term: RateTerm) -> RateTerm:
        return replace(term, maps=tuple(with_weight(one, lambda weight: weight.to(dtype)) for one in term.maps))

    return replace(stage, bias=stage.bias.to(dtype), terms=tuple(map(cast, stage.terms)))
