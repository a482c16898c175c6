"""A trained net as stages: sums of linear paths, each followed by a rectifier, which neurons will stand for.

A stage's activation a = clip(z, 0, ceiling) of z = sum of maps(activation of an earlier stage) + bias becomes the rate
at which neurons fire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

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


# Linear layers as data, and how two that follow each other become one.
#
# An average pool is a convolution with fixed weights; followed by a convolution it is one larger convolution: a pool
# of 2 x 2 and a convolution of 3 x 3 are one of 6 x 6 with stride 2. A neuron between them would cost spikes and lose
# time.


Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvolutionMap:
    """A convolution without a bias, as ``torch.nn.functional.conv2d`` computes it."""

    ins: Shape
    """(channels, height, width) of an example that goes in."""
    weight: Tensor
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    fixed: bool = False
    """Whether the weights are those of a pool, a slice or the like, which were not trained."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map a batch of examples, in the type of the weights."""
        return functional.conv2d(x, self.weight, None, self.stride, self.padding, self.dilation, self.groups)

    @property
    def outs(self) -> Shape:
        """The shape of an example that comes out."""
        spans = zip(self.ins[1:], self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        return (len(self.weight), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in spans))

    @property
    def depthwise(self) -> bool:
        """Whether each channel is mapped by itself."""
        return self.groups == self.ins[0] == len(self.weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseMap:
    """A matrix product without a bias: x @ weight.T."""

    weight: Tensor
    fixed: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Map a batch of examples, in the type of the weights."""
        return x @ self.weight.T

    @property
    def ins(self) -> Shape:
        """The shape of an example that goes in."""
        return (self.weight.shape[1],)

    @property
    def outs(self) -> Shape:
        """The shape of an example that comes out."""
        return (self.weight.shape[0],)


@dataclass(frozen=True, eq=False, kw_only=True)
class FlattenMap:
    """All dimensions of an example in one."""

    ins: Shape

    def __call__(self, x: Tensor) -> Tensor:
        """Map a batch of examples."""
        return x.flatten(1)

    @property
    def outs(self) -> Shape:
        """The shape of an example that comes out."""
        return (math.prod(self.ins),)


LinearMap = ConvolutionMap | DenseMap | FlattenMap
Maps = tuple[LinearMap, ...]


def applied(maps: Sequence[LinearMap], x: Tensor) -> Tensor:
    """Map a batch of examples by each of the maps in turn."""
    for one in maps:
        x = one(x)
    return x


def with_weight(one: LinearMap, change: Callable[[Tensor], Tensor]) -> LinearMap:
    """The map with its weights changed; a flattening has none."""
    return one if isinstance(one, FlattenMap) else replace(one, weight=change(one.weight))


def then(maps: Maps, new: LinearMap) -> Maps:
    """The maps followed by a new one, which is joined with the last of them where one of both is fixed and the result
    is equal for every input."""
    if not maps:
        return (new,)
    last = maps[-1]
    if isinstance(new, ConvolutionMap) and isinstance(last, ConvolutionMap) and (last.fixed or new.fixed):
        joined = _joined(last, new)
        return (*maps, new) if joined is None else then(maps[:-1], joined)
    if isinstance(new, DenseMap):
        return _before_dense(maps, new)
    return (*maps, new)


def scaled(maps: Maps, factor: Tensor, shape: Shape) -> Maps:
    """The maps with each channel (dimension 0 of the shape that comes out) multiplied by its factor."""
    last = maps[-1] if maps else None
    if isinstance(last, FlattenMap):
        per_number = factor.repeat_interleave(last.outs[0] // len(factor)) if len(factor) != last.outs[0] else factor
        return (*maps, DenseMap(weight=torch.diag(per_number), fixed=True))
    if last is None:
        return (diagonal(factor, shape),)
    return (*maps[:-1], _rows_scaled(last, factor))


def scaled_inputs(maps: Maps, factor: Tensor, shape: Shape) -> Maps:
    """The maps of inputs whose channels are first multiplied by their factors; ``shape``: of those inputs."""
    if not maps:
        return (diagonal(factor, shape),)
    first = maps[0]
    if isinstance(first, FlattenMap):
        return (first, *scaled_inputs(maps[1:], factor.repeat_interleave(first.outs[0] // len(factor)), first.outs))
    if isinstance(first, DenseMap):
        return (replace(first, weight=first.weight * factor), *maps[1:])
    a_group = factor.reshape(first.groups, -1)  # (groups, channels in of each)
    of_output = a_group.repeat_interleave(len(first.weight) // first.groups, dim=0)
    return (replace(first, weight=first.weight * of_output[:, :, None, None]), *maps[1:])


def diagonal(factor: Tensor, shape: Shape) -> LinearMap:
    """The map that multiplies each channel of this shape by its factor."""
    if len(shape) == 1:
        return DenseMap(weight=torch.diag(factor), fixed=True)
    return ConvolutionMap(ins=shape, weight=factor.reshape(-1, 1, 1, 1), groups=len(factor), fixed=True)


def pool(ins: Shape, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> ConvolutionMap:
    """An average pool that counts its padding."""
    weight = torch.full((ins[0], 1, *kernel), 1 / (kernel[0] * kernel[1]), dtype=torch.float64)
    return ConvolutionMap(ins=ins, weight=weight, stride=stride, padding=padding, groups=ins[0], fixed=True)


def _rows_scaled(one: ConvolutionMap | DenseMap, factor: Tensor) -> LinearMap:
    return replace(one, weight=one.weight * factor.reshape(-1, *[1] * (one.weight.ndim - 1)))


def _joined(first: ConvolutionMap, second: ConvolutionMap) -> ConvolutionMap | None:
    """One convolution that computes both for every input; None where there is none."""
    if first.dilation != (1, 1) or not _padding_moves(first, second):
        return None
    if first.depthwise:
        weight, groups = _kernel_of_depthwise_first(first, _spread(second)), second.groups
    elif second.depthwise:
        weight = functional.conv_transpose2d(
            _spread(second).transpose(0, 1), first.weight, stride=first.stride, groups=len(first.weight)
        ).unflatten(1, first.weight.shape[:2])[0]
        groups = first.groups
    else:
        return None
    pads = [p + s * q for p, s, q in zip(first.padding, first.stride, second.padding, strict=True)]
    strides = [a * b for a, b in zip(first.stride, second.stride, strict=True)]
    return ConvolutionMap(
        ins=first.ins,
        weight=weight.contiguous(),
        stride=(strides[0], strides[1]),
        padding=(pads[0], pads[1]),
        groups=groups,
        fixed=first.fixed and second.fixed,
    )


def _padding_moves(first: ConvolutionMap, second: ConvolutionMap) -> bool:
    """Whether the zeros around the second one's input are what the first one makes of zeros around its own."""
    if second.padding == (0, 0):
        return True
    spans = zip(first.ins[1:], first.outs[1:], first.weight.shape[2:], first.stride, first.padding, strict=True)
    return all(kernel <= stride and not pad and out * stride >= n for n, out, kernel, stride, pad in spans)


def _spread(one: ConvolutionMap) -> Tensor:
    """The kernels with the zeros of the dilation between their numbers."""
    if one.dilation == (1, 1):
        return one.weight
    (h, w), (dh, dw) = one.weight.shape[2:], one.dilation
    wide = one.weight.new_zeros(*one.weight.shape[:2], dh * (h - 1) + 1, dw * (w - 1) + 1)
    wide[:, :, ::dh, ::dw] = one.weight
    return wide


def _kernel_of_depthwise_first(first: ConvolutionMap, second: Tensor) -> Tensor:
    inside = second.shape[1]  # channels in of a group of the second
    outs = len(second) * inside // first.ins[0]  # channels out of a group of the second
    parts = [
        functional.conv_transpose2d(
            second[at * outs : (at + 1) * outs],
            first.weight[at * inside : (at + 1) * inside],
            stride=first.stride,
            groups=inside,
        )
        for at in range(first.ins[0] // inside)
    ]
    return torch.cat(parts)


def _before_dense(maps: Maps, new: DenseMap) -> Maps:
    """The product's weights pulled back through fixed convolutions before it."""
    if isinstance(maps[-1], DenseMap) and (maps[-1].fixed or new.fixed):
        joined = DenseMap(weight=new.weight @ maps[-1].weight, fixed=maps[-1].fixed and new.fixed)
        return then(maps[:-1], joined)
    if len(maps) < 2 or not isinstance(maps[-1], FlattenMap):
        return (*maps, new)
    before = maps[-2]
    if not isinstance(before, ConvolutionMap) or not before.fixed:
        return (*maps, new)
    x = torch.zeros(len(new.weight), *before.ins, dtype=new.weight.dtype, requires_grad=True)
    with torch.enable_grad():
        out = (before(x).flatten(1) * new.weight).sum()
    (weight,) = torch.autograd.grad(out, x)
    pulled = DenseMap(weight=weight.flatten(1).detach(), fixed=new.fixed)
    return then((*maps[:-2], FlattenMap(ins=before.ins)), pulled)
