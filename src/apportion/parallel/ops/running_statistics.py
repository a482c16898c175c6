"""Running mean and variance of what passes, as sums: they add up over batches, over workers and over ranks.

A sum of values and a sum of squares, in float64, are what every strategy keeps without knowing about it: a parameter
store adds up the changes of buffers, and ranks that share a batch add up what each has seen of it. A mean and a
variance would have to be weighted. Values of the size of observations lose nothing to cancellation in float64.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from apportion.comm.group import collective
from apportion.parallel.ops.non_empty_ranks import NonEmptyRanks

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
    def take(self, values: Tensor) -> None:
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
