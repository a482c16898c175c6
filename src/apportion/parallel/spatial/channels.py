"""Convolutions whose channels lie on the ranks: each rank has some of the filters, or some of what they look at.

::

    split="channel"   whole x --column--> channels of y on the ranks --row--> sums of z, added up: whole z
    split="group"     whole x --column--> channels --grouped--> channels (nothing moves) --gather, column--> channels

A *column* layer has some of the filters and looks at all channels; a *row* layer has all filters, and of each the part
that looks at this rank's channels, so that its outputs are terms of a sum (the names are Megatron-LM's). A grouped
layer whose groups the ranks share looks at this rank's own channels alone: AlexNet's two towers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.comm.differentiable import all_gather
from apportion.comm.group import Group
from apportion.core.torch_private import BatchNormBase
from apportion.parallel.spatial.conv import Conv, pad_across, plain_conv
from apportion.parallel.spatial.geometry import Bounds, equal, sizes, strip
from apportion.parallel.spatial.placements import SpatialPlan, positions
from apportion.parallel.spatial.strip import SpatialShard, redistributed, shared, summed

SliceOf = Callable[[str, int, Sequence[int] | None], Tensor]
"""A function that gives this rank's slice of a layer's "weight" or "bias", called with (which of the two, which
dimension, which positions). None: all positions, as on every rank."""


def conv(
    plan: SpatialPlan, x: Tensor | SpatialShard, shape: torch.Size, bias: bool, settings: Conv, slice_of: SliceOf
) -> Tensor | SpatialShard | None:
    """Compute a convolution with weights of this shape; None where it has too few channels for the ranks."""
    group, outputs, inputs = plan.group, shape[0], shape[1] * settings.groups
    if settings.groups > 1:
        plan.grouped = True
        if settings.groups < group.size:
            if plan.split == "group":
                raise ValueError(
                    f"groups={settings.groups} cannot be shared by {group.size} workers: "
                    f'use workers<={settings.groups}, or split="channel"'
                )
            return None
        groups = equal(settings.groups, group.size)
        seen: Bounds = tuple(n * shape[1] for n in groups)
        made: Bounds = tuple(n * (outputs // settings.groups) for n in groups)
    else:
        seen, made = (0, *[inputs] * group.size), equal(outputs, group.size)
        if plan.split == "channel" and isinstance(x, SpatialShard):
            return _row(x, bias, settings, slice_of, group)
        if outputs < group.size:
            return None
    rows, mine = strip(made, group.rank), positions(strip(made, group.rank))
    own = _seen(x, seen, settings.groups > 1, group)
    local = settings if settings.groups == 1 else settings.with_groups(own.shape[1] // shape[1])
    y = convolved(own, slice_of("weight", 0, mine), slice_of("bias", 0, mine) if bias else None, local)
    assert y.shape[1] == rows.n
    return SpatialShard(y, 1, made)


def _seen(x: Tensor | SpatialShard, bounds: Bounds, grouped: bool, group: Group) -> Tensor:
    """The channels that this rank's filters look at."""
    if not grouped:
        return (
            all_gather(x.own.contiguous(), group, 1, sizes(x.bounds))
            if isinstance(x, SpatialShard)
            else shared(x, group)
        )
    if isinstance(x, SpatialShard):
        return redistributed(x, bounds, group).own
    rows = strip(bounds, group.rank)
    return shared(x, group).narrow(1, rows.start, rows.n)


def _row(x: SpatialShard, bias: bool, settings: Conv, slice_of: SliceOf, group: Group) -> Tensor:
    weight = slice_of("weight", 1, positions(strip(x.bounds, group.rank)))
    y = summed(convolved(x.own, weight, None, settings), group)
    if bias:
        y = y + slice_of("bias", 0, None).to(y.dtype).view(-1, *[1] * (y.dim() - 2))
    return y


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Conv) -> Tensor:
    """Compute the plain convolution, with padding of any mode."""
    pairs = list(zip(settings.before, settings.after, strict=True))
    padding = settings.before
    if settings.mode != "zeros" or any(first != last for first, last in pairs):
        for d, pair in enumerate(pairs):
            mode = "constant" if settings.mode == "zeros" else settings.mode
            x = pad_across(x, d + 2, pair, mode) if any(pair) else x
        padding = (0,) * len(pairs)
    return plain_conv(x, weight, bias, settings, padding)


def batch_norm(plan: SpatialPlan, layer: BatchNormBase, x: SpatialShard) -> SpatialShard:
    """Compute a batch normalisation: every channel has statistics of its own, which the rank that has the channel
    has."""
    mine = positions(strip(x.bounds, plan.group.rank))
    slices = {
        name: plan.parameter_slice(layer, name, 0, mine)
        for name in ("weight", "bias", "running_mean", "running_var")
        if getattr(layer, name) is not None
    }
    if not plan.planning:
        y: Tensor = layer(x.own)
        return x.like(y)
    mean, variance = slices.get("running_mean"), slices.get("running_var")
    own = functional.batch_norm(x.own, mean, variance, slices.get("weight"), slices.get("bias"), mean is None)
    return x.like(own)


def group_norm(plan: SpatialPlan, layer: nn.GroupNorm, x: SpatialShard) -> SpatialShard | None:
    """Compute a GroupNorm layer where whole groups of channels lie on a rank; None elsewhere."""
    each = layer.num_channels // layer.num_groups
    if any(at % each for at in x.bounds):
        return None
    mine = positions(strip(x.bounds, plan.group.rank))
    weight = plan.parameter_slice(layer, "weight", 0, mine) if layer.weight is not None else None
    bias = plan.parameter_slice(layer, "bias", 0, mine) if layer.bias is not None else None
    return x.like(functional.group_norm(x.own, len(mine) // each, weight, bias, layer.eps))


def prelu(plan: SpatialPlan, layer: nn.PReLU, x: SpatialShard) -> SpatialShard:
    """Compute a PReLU layer with one slope for all channels, or with one for each."""
    if layer.weight.numel() == 1 or x.dim != 1:
        return x.like(functional.prelu(x.own, plan.used_on_strips(layer.weight)))
    weight = plan.parameter_slice(layer, "weight", 0, positions(strip(x.bounds, plan.group.rank)))
    return x.like(functional.prelu(x.own, weight))
