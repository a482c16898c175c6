"""Normalisation over an image that lies on the ranks in strips: every statistic is that of the whole image.

Batch, group, instance and layer normalisation differ in which values they take together. Each is a normalisation of
the rows of a matrix whose columns lie on the ranks, and that is what ``batch_norm.py`` does with its channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apportion.comm.group import Group
from apportion.parallel.batch_norm import Attendance, _Normalize, use_whole_batch
from apportion.parallel.strips_tensor import Strip


def batch_norm(x: Strip, layer: _BatchNorm, attendance: Attendance) -> Strip:
    """BatchNorm1d, BatchNorm2d, BatchNorm3d; ``layer`` has been made to ask all ranks (``use_whole_batch``)."""
    attendance.present = x.own.numel() > 0
    y: Tensor = layer(x.own)
    return x.like(y)


def ask_all_ranks(layer: _BatchNorm, attendance: Attendance) -> None:
    """From now on the layer's statistics are those of all ranks' rows."""
    use_whole_batch(layer, attendance)


def group_norm(x: Strip, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group) -> Strip:
    """GroupNorm; InstanceNorm has a group for each channel."""
    own = x.own
    y = _normalised(x, own.shape[0] * groups, eps, group)
    for p, combine in ((weight, torch.mul), (bias, torch.add)):
        if p is not None:
            y = combine(y, p.view(-1, *[1] * (own.dim() - 2)))
    return x.like(y)


def layer_norm(x: Strip, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group) -> Strip:
    """LayerNorm over the last ``dims`` dimensions, of which one is cut; the weights are of its shape."""
    y = _normalised(x, x.own.shape[: x.own.dim() - dims].numel(), eps, group)
    start, n = x.bounds[group.rank], x.own.shape[x.dim]
    for p, combine in ((weight, torch.mul), (bias, torch.add)):
        if p is not None:
            y = combine(y, p.narrow(x.dim - (x.own.dim() - dims), start, n))
    return x.like(y)


def _normalised(x: Strip, rows: int, eps: float, group: Group) -> Tensor:
    """As so many rows of values, each with the mean 0 and the variance 1 over all ranks."""
    own = x.own
    if x.shape.numel() == rows:  # each is its own mean
        return own * 0.0
    matrix = own.reshape(1, rows, own.numel() // rows)
    y, *_ = _Normalize.apply(matrix, None, None, eps, group, own.numel() > 0)
    return y.view(own.shape)  # type: ignore[no-any-return]


def is_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and type(layer).forward is _BatchNorm.forward
