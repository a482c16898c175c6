"""The share of each batch that a rank takes, in proportion to how fast it is found to be."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from apportion.comm.group import Group, collective
from apportion.core.sampler import DataShard

EVERY_STEPS = 8
"""The number of steps between two looks at every rank's speed."""
TOLERANCE = 0.05
"""The relative change of a share below which it is noise, and the shares stay."""
SMOOTHING = 0.5
"""The part of the way that a share goes to what was measured last: a rank's fixed costs make its speed depend on its
share."""


def new_shares(shares: Sequence[float], speeds: Sequence[float], batch_size: int) -> tuple[float, ...]:
    """The shares (which add up to 1) after ranks were found to make ``speeds`` rows a second (0: not known). Every
    rank keeps a row at least, so that its speed goes on being known."""
    known = [speed for speed in speeds if speed > 0.0]
    if not known:
        return tuple(shares)
    usual = sorted(known)[len(known) // 2]
    filled = [speed if speed > 0.0 else usual for speed in speeds]
    wanted = [speed / sum(filled) for speed in filled]
    if all(abs(w - s) <= TOLERANCE * s for w, s in zip(wanted, shares, strict=True)):
        return tuple(shares)
    moved = [max(s + SMOOTHING * (w - s), 1.0 / batch_size) for w, s in zip(wanted, shares, strict=True)]
    return tuple(m / sum(moved) for m in moved)


class MeasuredShares:
    """One rank's clock, and the shares that follow from all ranks' clocks: the same shares on each of them."""

    def __init__(self, rank: int, size: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self.start_over(rank, size)

    def start_over(self, rank: int, size: int) -> None:
        """Start again among other ranks, with equal shares until speeds are known."""
        self._rank = rank
        self._shares: tuple[float, ...] = (1.0 / size,) * size
        self._rows = self._steps = 0
        self._seconds = 0.0
        self._since: float | None = None
        self.shard = DataShard(rank, size, shares=self._shares)

    def computed(self, rows: int, waited: float) -> None:
        """Record that this rank has computed ``rows`` rows since ``start_clock``, of which time it waited ``waited``
        seconds for others."""
        if self._since is not None:
            self._rows += rows
            self._seconds += time.perf_counter() - self._since - waited
            self._steps += 1

    def start_clock(self) -> None:
        """Start the clock, as rows begin to be computed."""
        self._since = time.perf_counter()

    @collective
    def update_shares(self, group: Group) -> None:
        """Exchange every rank's speed now and then, and take the shares that follow. Called by all ranks after every
        step."""
        if self._steps < EVERY_STEPS:
            return
        speed = self._rows / self._seconds if self._seconds > 0.0 else 0.0
        speeds = group.all_gather(torch.tensor([speed], dtype=torch.float64)).flatten().tolist()
        self._rows, self._steps, self._seconds = 0, 0, 0.0
        shares = new_shares(self._shares, speeds, self._batch_size)
        if shares != self._shares:
            self._shares, self.shard = shares, DataShard(self._rank, len(shares), shares=shares)
