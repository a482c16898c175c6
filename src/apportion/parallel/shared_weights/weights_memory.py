"""The two versions of the weights in shared memory, with the optimizer's slots, the counts and the buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from apportion.comm.sync import CommitWord
from apportion.core.fault_points import reached
from apportion.parallel.optim.elementwise import ElementwiseRule, FlatPiece
from apportion.parallel.shared_weights.layout import SharedLayout, shaped

_COMMIT, _READY = 0, 1


@final
class WeightsMemory:
    """The versions as this process maps them, and the word that says which is live."""

    def __init__(self, layout: SharedLayout, memory: memoryview, parameters: Sequence[nn.Parameter]) -> None:
        self.layout, self.bytes, self.parameters = layout, memory, parameters
        self.commit, self.ready = (
            CommitWord(ctypes.c_int64.from_buffer(memory, 8 * word)) for word in (_COMMIT, _READY)
        )
        versions = range(layout.versions)
        self.counts = [self.tensor(f"counts/{v}").numpy() for v in versions]
        self.flat = [
            [
                FlatPiece(
                    self.tensor(f"weights/{v}/{r}"), tuple(self.tensor(f"{s}/{v}/{r}") for s in region.rule.slots)
                )
                for r, region in enumerate(layout.regions)
            ]
            for v in versions
        ]
        self.moved = [
            [
                *(self.tensor(f"buffer/{v}/{b}").view(shape) for b, (shape, _) in enumerate(layout.buffers)),
                *(self.tensor(f"frozen/{v}/{k}").view(shape) for k, (shape, _) in enumerate(layout.frozen)),
            ]
            for v in versions
        ]
        """What forward passes change: the buffers, and the parameters that no optimizer has."""
        self.reported = [self.tensor(f"reported/{v}").numpy() for v in versions]
        self.place = {
            i: (r, start)
            for r, region in enumerate(layout.regions)
            for i, start in zip(region.parameters, region.starts, strict=True)
        }
        """The region of each parameter, and the element at which it begins there."""
        self._views = [[self.view("weights", v, i) for i in range(len(parameters))] for v in versions]

    def tensor(self, name: str) -> Tensor:
        """Return one of the layout's parts as a flat tensor."""
        return self.layout.tensor(self.bytes, name)

    def rule(self, i: int) -> ElementwiseRule:
        """Return the rule by which a parameter is updated."""
        return self.layout.regions[self.place[i][0]].rule

    def view(self, part: str, version: int, i: int) -> Tensor:
        """Return a parameter's weights, or one of its slots, in a version."""
        r, start = self.place[i]
        piece, slots = self.flat[version][r], self.rule(i).slots
        flat = piece.weights if part == "weights" else piece.slots[slots.index(part)]
        return shaped(flat, start, self.parameters[i])

    def weights(self, version: int) -> list[Tensor]:
        """Return the weights of every parameter in a version."""
        return self._views[version]

    def bind(self, version: int) -> None:
        """Let the parameters lie in a version."""
        for p, view in zip(self.parameters, self._views[version], strict=True):
            p.data = view
        reached("bound")

    def is_uniform(self, version: int) -> bool:
        """Return whether all parameters have had equally many updates."""
        counts = self.counts[version]
        return bool(len(counts) == 0 or (counts == counts[0]).all())


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

    def report(self, loss: float, used: Sequence[bool] | None) -> None:
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

    def report_squares(self, squares: float) -> None:
        """Write the sum of squares of this rank's slice of the gradient."""
        self._lines[self._rank, _SQUARES] = squares

    def squares(self) -> float:
        """Return the sum of squares of the whole gradient."""
        return sum(float(self._lines[rank, _SQUARES]) for rank in range(self._size))
