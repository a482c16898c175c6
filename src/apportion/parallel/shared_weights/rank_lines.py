"""The line of shared memory on which each rank tells the others about its part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from apportion.parallel.shared_weights.weights_memory import WeightsMemory

_LOSS, _ALL_USED, _SQUARES = 0, 1, 2


@final
class RankLines:
    """The lines of all ranks."""

    def __init__(self, memory: WeightsMemory) -> None:
        workers = memory.layout.workers
        self._lines = memory.tensor("line").view(workers, 8).numpy()
        self._used = memory.tensor("used").view(workers, -1).numpy()
        self._rank = self._size = 0

    def attach(self, rank: int, size: int) -> None:
        """Take this process's line; the first ``size`` lines are read."""
        self._rank, self._size = rank, size

    def tell(self, loss: float, used: Sequence[bool] | None) -> None:
        """Write this rank's part of the loss, and which parameters it has a gradient of; None: of all."""
        line = self._lines[self._rank]
        line[_LOSS] = loss
        line[_ALL_USED] = used is None
        if used is not None:
            self._used[self._rank] = used

    def loss(self) -> float:
        """Return the sum over ranks of what each has reported, in rank order."""
        return sum(self._lines[rank, _LOSS] for rank in range(self._size))  # type: ignore[no-any-return]

    def used_by(self) -> Any:
        """Return which rank has used which parameters, (ranks, parameters); None: every rank has used all of them."""
        if all(self._lines[rank, _ALL_USED] for rank in range(self._size)):
            return None
        return np.stack([self._used[rank] | bool(self._lines[rank, _ALL_USED]) for rank in range(self._size)])

    def tell_squares(self, squares: float) -> None:
        """Write the sum of squares of this rank's slice of the gradient."""
        self._lines[self._rank, _SQUARES] = squares

    def squares(self) -> float:
        """Return the sum of squares of the whole gradient."""
        return sum(float(self._lines[rank, _SQUARES]) for rank in range(self._size))
