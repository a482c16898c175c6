"""Normalisation over an image that lies on the ranks in strips: every statistic is that of the whole image.

Batch, group, instance and layer normalisation differ in which values they take together. Each is a normalisation of
the rows of a matrix whose columns lie on the ranks, and that is what ``sync_batch_norm.py`` does with its channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apportion.comm.group import Group
from apportion.core.torch_private import BatchNormBase
from apportion.parallel.ops.non_empty_ranks import NonEmptyRanks
from apportion.parallel.ops.sync_batch_norm import Normalize, use_whole_batch
from apportion.parallel.spatial import channels
from apportion.parallel.spatial.placements import SpatialPlan
from apportion.parallel.spatial.strip import SpatialShard


def over_image(holding: SpatialPlan, x: SpatialShard) -> bool:
    """Return whether an image is cut as a normalisation takes it: behind its channels, or along them."""
    return not x.flat and (x.dim > 1 if holding.spatial else x.dim == 1)


def batch_norm(holding: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute BatchNorm1d, BatchNorm2d or BatchNorm3d; where the image is cut, the layer asks all ranks for its
    statistics."""
    if not over_image(holding, x):
        return holding.on_all(layer, x)
    if not holding.spatial:
        return channels.batch_norm(holding, layer, x)
    for p in (layer.weight, layer.bias):
        holding.use(p)
    if holding.planning:
        holding.norms.append(layer)
        return x  # its statistics would be of this rank's rows
    holding.attendance.present = x.own.numel() > 0
    return x.like(layer(x.own))


def ask_all_ranks(layer: BatchNormBase, attendance: NonEmptyRanks) -> None:
    """Make the layer's statistics those of all ranks' rows, from now on."""
    use_whole_batch(layer, attendance)


def group_norm(holding: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute a GroupNorm layer: on the parts of the image or of its channels where that is possible, else on the
    whole."""
    if holding.spatial and over_image(holding, x):
        return _by_groups(holding, layer, x, layer.num_groups)
    found = channels.group_norm(holding, layer, x) if not holding.spatial and over_image(holding, x) else None
    return found if found is not None else holding.on_all(layer, x)


def instance_norm(holding: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute InstanceNorm1d, InstanceNorm2d or InstanceNorm3d, with a group for each channel."""
    if layer.track_running_stats:
        raise ValueError("its running statistics are means over examples: use track_running_stats=False")
    if holding.spatial and over_image(holding, x):
        return _by_groups(holding, layer, x, x.own.shape[1])
    return holding.on_all(layer, x)


def _by_groups(holding: SpatialPlan, layer: Any, x: SpatialShard, groups: int) -> SpatialShard:
    y = _normalised(x, x.own.shape[0] * groups, layer.eps, holding.group)
    for p, combine in ((layer.weight, torch.mul), (layer.bias, torch.add)):
        if p is not None:
            y = combine(y, holding.use(p).view(-1, *[1] * (y.dim() - 2)))
    return x.like(y)


def layer_norm(holding: SpatialPlan, layer: Any, x: SpatialShard) -> Any:
    """Compute a LayerNorm over the last dimensions; where one of them is cut, the rows of its weights are cut, too."""
    if x.flat:
        return holding.on_all(layer, x)
    before = x.own.dim() - len(layer.normalized_shape)
    weight, bias = holding.use(layer.weight), holding.use(layer.bias)
    if x.dim < before:  # it looks at what this rank has
        return x.like(functional.layer_norm(x.own, layer.normalized_shape, weight, bias, layer.eps))
    y = _normalised(x, x.own.shape[:before].numel(), layer.eps, holding.group)
    start, n = x.bounds[holding.group.rank], x.own.shape[x.dim]
    for p, combine in ((weight, torch.mul), (bias, torch.add)):
        if p is not None:
            y = combine(y, p.narrow(x.dim - before, start, n))
    return x.like(y)


def _normalised(x: SpatialShard, rows: int, eps: float, group: Group) -> Tensor:
    """Normalise an image, taken as ``rows`` rows of values, so that each row has the mean 0 and the variance 1 over all
    ranks."""
    own = x.own
    if x.shape.numel() == rows:  # each is its own mean
        return own * 0.0
    matrix = own.reshape(1, rows, own.numel() // rows)
    y, *_ = Normalize.apply(matrix, None, None, eps, group, own.numel() > 0)
    return y.view(own.shape)  # type: ignore[no-any-return]
