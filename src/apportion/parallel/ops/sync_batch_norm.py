"""Batch normalisation over the whole global batch, on any device (torch's SyncBatchNorm wants a GPU).

The mean and the sum of squared deviations of each rank's rows are combined by Chan's formula, so that nothing is lost
to cancellation: the statistics, the running statistics and every gradient are those of one device, to rounding.

Ioffe and Szegedy, "Batch Normalization", 2015; Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances", 1979.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from apportion.comm.group import Group, collective
from apportion.core.torch_private import BatchNormBase


@dataclass
class NonEmptyRanks:
    """The group of ranks over which statistics are taken, and whether this rank takes part with its rows."""

    group: Group
    present: bool = True
    """Tells whether this rank's rows are its own. A rank without any computes a borrowed one, which must not count."""

    def __deepcopy__(self, memo: Any) -> NonEmptyRanks:
        """Raise TypeError: a copy of a model must have no layers that ask other ranks, even where there are none."""
        raise TypeError("a group of ranks is not copied with a model: make another model")


LEAST_VARIANCE = 1e-8


@final
class RunningStatistics(nn.Module):
    """The mean and the deviation of each of ``size`` numbers over all that was taken in so far."""

    count: Tensor
    total: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("total", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))
        self.whole: NonEmptyRanks | None = None
        """The ranks that each have a share of what is taken in; None: this process has all of it."""

    @collective
    @torch.no_grad()
    def accumulate(self, values: Tensor) -> None:
        """Take in rows of numbers, (n, size); called by all ranks of ``whole``."""
        values = values.to(torch.float64)
        found = torch.cat([values.new_tensor([len(values)]), values.sum(0), values.square().sum(0)])
        if self.whole is not None:
            found = found if self.whole.present else torch.zeros_like(found)
            found = self.whole.group.all_gather(found).view(-1, len(found)).sum(0)
        size = len(self.total)
        self.count.add_(found[:1])
        self.total.add_(found[1 : 1 + size])
        self.squares.add_(found[1 + size :])

    @property
    def mean(self) -> Tensor:
        """The mean of each number; 0 before anything was taken in. (size,), float64."""
        return self.total / self.count.clamp_min(1.0)

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of each number; 1 before anything was taken in. (size,), float64."""
        variance = self.squares / self.count.clamp_min(1.0) - self.mean.square()
        return torch.where(self.count > 0, variance.clamp_min(LEAST_VARIANCE).sqrt(), 1.0)

    @property
    def scale(self) -> Tensor:
        """The root of the mean square of each number; 1 before anything was taken in. (size,), float64."""
        return torch.where(
            self.count > 0, (self.squares / self.count.clamp_min(1.0)).clamp_min(LEAST_VARIANCE).sqrt(), 1.0
        )


def use_whole_batch(model: nn.Module, attendance: NonEmptyRanks) -> list[str]:
    """Make every batch normalisation of the model, and all running statistics, take in what all ranks of the group
    have; returns their names.

    In place, by class: names, parameters, buffers and hooks stay. A layer with a ``forward`` of its own is left alone:
    see ``batch_coupling/sync_batch_functions.py``.
    """
    changed = []
    forward: Any = None
    for name, layer in model.named_modules():
        if isinstance(layer, RunningStatistics):
            layer.whole = attendance
            changed.append(name)
        if isinstance(layer, nn.SyncBatchNorm) or (
            isinstance(layer, BatchNormBase) and type(layer).forward is BatchNormBase.forward
        ):
            # Here: as a decorator it would import the compiler, and where there is no such layer nothing needs it.
            forward = forward or torch.compiler.disable(_WholeBatchNorm.forward)
            layer.__class__ = type(f"Whole{type(layer).__name__}", (_WholeBatchNorm, type(layer)), {"forward": forward})
            layer._whole = attendance  # type: ignore[assignment]
            changed.append(name)
    return changed


class _WholeBatchNorm(BatchNormBase):
    _whole: NonEmptyRanks

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        whole = self._whole
        y, mean, squares, n = Normalize.apply(x, self.weight, self.bias, self.eps, whole.group, whole.present)
        if self.training and self.track_running_stats:
            self._track(mean, squares, n)
        return y  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, squares: Tensor, n: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        assert momentum is not None
        self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean.dtype), alpha=momentum)
        self.running_var.mul_(1 - momentum).add_((squares / (n - 1)).to(self.running_var.dtype), alpha=momentum)


class Normalize(Function):
    """Normalisation over all ranks' rows: x (N, C, ...) -> normalised; also the mean (C), the sum of squared deviations
    (C) and the number of values a channel (1)."""

    @staticmethod
    def forward(  # noqa: PLR0913 (what the layer has)
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group, present: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        stats_dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        mean, squares, n = _combine(group.all_gather(_local_statistics(x, stats_dtype, present)), channels)
        scale = weight if weight is not None else torch.ones_like(mean)
        shift = bias if bias is not None else torch.zeros_like(mean)
        variance = squares / n
        y = torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(x, scale, mean, variance, n)
        ctx.group, ctx.eps, ctx.present = group, eps, present
        ctx.affine = weight is not None, bias is not None
        ctx.mark_non_differentiable(mean, squares, n)
        return y, mean, squares, n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        x, scale, mean, variance, n = ctx.saved_tensors
        # Laid out as x: torch's kernel for channels last goes wrong on images of one column where they differ.
        dy = dy.contiguous() if x.is_contiguous() else torch.empty_like(x, dtype=dy.dtype).copy_(dy)
        # As in evaluation: dy * scale / deviation, and this rank's sums of dy * normalised and of dy.
        dx, d_scale, d_shift = torch.ops.aten.native_batch_norm_backward(
            dy, x, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.cat([d_shift, d_scale])
        ctx.group.all_reduce(sums).wait()
        if ctx.present:
            shape = [1, -1] + [1] * (x.dim() - 2)
            deviation = torch.rsqrt(variance + ctx.eps)
            sum_dy, sum_dy_normalised = sums.chunk(2)
            through_mean = (scale * deviation * sum_dy / n).view(shape)
            through_variance = (scale * deviation**2 * sum_dy_normalised / n).view(shape)
            centred = x.to(mean.dtype) - mean.view(shape)
            dx = (dx - through_mean).addcmul_(centred, through_variance, value=-1).to(x.dtype)
        has_weight, has_bias = ctx.affine
        return dx, d_scale if has_weight else None, d_shift if has_bias else None, None, None, None


def _local_statistics(x: Tensor, dtype: torch.dtype, present: bool) -> Tensor:
    """Return (2C + 1): this rank's mean, sum of squared deviations, and number of values a channel."""
    channels = x.shape[1]
    if not present:
        return x.new_zeros(2 * channels + 1, dtype=dtype)
    n = x.numel() // channels
    rows = [d for d in range(x.dim()) if d != 1]
    # Two passes of pairwise sums: three times as fast as torch.var_mean here, and a hundred times as accurate.
    mean = x.sum(rows, dtype=dtype) / n
    centred = x.to(dtype) - mean.view([1, -1] + [1] * (x.dim() - 2))
    return torch.cat([mean, centred.square_().sum(rows), mean.new_tensor([n])])


def _combine(gathered: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Combine statistics over ranks by Chan's formula, in rank order: mean (C), sum of squared deviations (C), number
    of values (1)."""
    means, squares, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    n = counts.sum(0)
    if n.item() <= 1:
        raise ValueError(
            "batch normalisation needs more than one value per channel when training: the global batch has 1"
        )
    mean = (means * counts).sum(0) / n
    return mean, (squares + counts * (means - mean).square()).sum(0), n
