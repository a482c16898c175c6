"""SyncBatchNorm on the CPU, where torch has none: statistics of the rows of all ranks, over gloo."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from apportion.script_check.recording.tensors import gathering


class _NoLayer(nn.Module):
    """A layer that no script has."""


class _SumOfRanks(torch.autograd.Function):
    """The sum over all ranks of a group, which is also that of the gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _summed(gradients[0], ctx.group), None


def _summed(part: Tensor, group: Any) -> Tensor:
    total = part.detach().clone(memory_format=torch.contiguous_format)
    gathering.append(True)  # a collective of this module, and not of the script
    try:
        dist.all_reduce(total, group=group)
    finally:
        gathering.pop()
    return total


def install() -> None:
    """Have SyncBatchNorm compute on the CPU."""
    nn.SyncBatchNorm.forward = _forward  # type: ignore[method-assign]
    begin: Any = DistributedDataParallel.__init__

    @wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.modules.SyncBatchNorm = _NoLayer  # type: ignore[misc,assignment]
        try:  # the wrapper looks for layers of this name, to refuse them on the CPU
            begin(self, *args, **kwargs)
        finally:
            nn.modules.SyncBatchNorm = nn.SyncBatchNorm  # type: ignore[misc]

    DistributedDataParallel.__init__ = begun  # type: ignore[method-assign]


def _forward(self: Any, input: Tensor) -> Tensor:
    if not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) < 2:
        return nn.BatchNorm1d.forward(self, input)
    dimensions = [each for each in range(input.dim()) if each != 1]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    count = input.new_full((1,), input.numel() / input.shape[1])
    total = _SumOfRanks.apply(torch.cat([input.sum(dimensions), count]), self.process_group)
    mean = total[:-1] / total[-1]
    squares = _SumOfRanks.apply((input - mean.view(shape)).square().sum(dimensions), self.process_group)
    variance = squares / total[-1]
    if self.track_running_stats:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(squares / (total[-1] - 1), share)
    normal: Tensor = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
    if self.affine:
        normal = normal * self.weight.view(shape) + self.bias.view(shape)
    return normal
