"""custom: an order of your own, as for a curriculum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from apportion.core.order import Index, Order
from apportion.core.workload_rules import misfit, name_of


@final
@dataclass(frozen=True, repr=False)
class Custom(Order):
    """The examples that a function names, in its order: ``custom(lambda seed, epoch: easy_first(epoch))``.

    The function must be pure: for one (seed, epoch) it returns the same in every process. A proof, which trains on a
    few rows, takes these shuffled."""

    function: Callable[[int, int], Any]
    """A function (seed, epoch) -> the indices of the examples of that epoch, each once, several times or not at all;
    as many in every epoch."""

    def __post_init__(self) -> None:
        if not callable(self.function) or misfit(self.function, 2) is not None:
            raise ValueError(
                f"function={self.function!r} must be a function (seed, epoch) -> indices: "
                "custom(lambda seed, epoch: easy_first(epoch))"
            )

    def __str__(self) -> str:
        first = self._indices(0, 0)
        return f"custom({name_of(self.function)} {hashlib.sha256(first.tobytes()).hexdigest()[:12]})"

    def length(self, examples: int) -> int:
        return len(self._indices(0, 0))

    def check(self, examples: int) -> None:
        self._checked(self._indices(0, 0), examples, 0)

    def epoch(self, examples: int, batch_size: int, seed: int, epoch: int) -> Index:
        found = self._indices(seed, epoch)
        self._checked(found, examples, epoch)
        if len(found) != self.length(examples):
            raise ValueError(
                f"order={self}: it gave {len(found):,} indices for epoch {epoch}, and {self.length(examples):,} for "
                "epoch 0: every epoch must have as many, since schedules and --steps count on it"
            )
        return found

    def of_rows(self, rows: object) -> Order:
        return _Permuted()

    def _indices(self, seed: int, epoch: int) -> Index:
        given = np.asarray(self.function(seed, epoch))
        if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given):
            raise ValueError(
                f"order=custom({name_of(self.function)}) must return at least one index, whole numbers in one "
                f"dimension, and returned {given.dtype} of shape {given.shape} for epoch {epoch}"
            )
        return given.astype(np.int64)

    def _checked(self, found: Index, examples: int, epoch: int) -> None:
        if found.min() < 0 or found.max() >= examples:
            wrong = int(found.min()) if found.min() < 0 else int(found.max())
            raise ValueError(
                f"order={self}: it gave the index {wrong} for epoch {epoch}, and the data set has {examples:,} "
                f"examples: 0 to {examples - 1}"
            )


@final
@dataclass(frozen=True, repr=False)
class _Permuted(Order):
    """Every example once, as "shuffled" takes them, but by the rules of an order."""

    def length(self, examples: int) -> int:
        return examples

    def epoch(self, examples: int, batch_size: int, seed: int, epoch: int) -> Index:
        import torch

        from apportion.core.order import generator

        drawn: Index = torch.randperm(examples, generator=generator(seed, epoch, 0x3E94)).numpy()
        return drawn
