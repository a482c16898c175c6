"""weighted: every draw is any example, with a probability in proportion to its weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from apportion.core.order import Index, Order, generator, must_be_draws


@final
@dataclass(frozen=True, repr=False, eq=False)
class Weighted(Order):
    """Draws with replacement, as ``torch.utils.data.WeightedRandomSampler`` does: for classes of unequal sizes,
    ``weighted(1 / class_size[labels])``."""

    weights: Any
    """The weight of each example, in the order of the data set: numbers of at least 0, as a list, a numpy array or a
    tensor."""
    draws: int | None = None
    """The examples that are drawn in an epoch; None: as many as the data set has."""

    def __post_init__(self) -> None:
        must_be_draws(self.draws)
        try:
            weights = np.asarray(self.weights, dtype=np.float64)
        except (TypeError, ValueError):
            weights = np.empty((0, 0))
        if weights.ndim != 1 or not len(weights):
            raise ValueError(
                f"weights= must be a number for each example, and this is a {type(self.weights).__name__} of shape "
                f"{np.shape(self.weights)}: weighted([1.0, 0.5, ...])"
            )
        if not np.isfinite(weights).all() or weights.min() < 0 or not 0 < weights.sum() < np.inf:
            raise ValueError("weights= must be finite numbers of at least 0, one of them above 0")
        object.__setattr__(self, "weights", weights)

    def __str__(self) -> str:
        digest = hashlib.sha256(self.weights.tobytes()).hexdigest()[:12]
        draws = "" if self.draws is None else f", draws={self.draws}"
        return f"weighted({len(self.weights)} weights {digest}{draws})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weighted) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def length(self, examples: int) -> int:
        return examples if self.draws is None else self.draws

    def check(self, examples: int) -> None:
        if len(self.weights) != examples:
            raise ValueError(
                f"order=weighted(...) has {len(self.weights):,} weights, and the data set has {examples:,} examples: "
                "give one for each"
            )

    def epoch(self, examples: int, batch_size: int, seed: int, epoch: int) -> Index:
        unit = torch.rand(self.length(examples), generator=generator(seed, epoch, 0x3E92), dtype=torch.float64).numpy()
        # The inverse of the cumulative distribution: torch.multinomial takes 2^24 weights at most.
        ends = np.cumsum(self.weights)
        drawn: Index = np.searchsorted(ends, unit * ends[-1], side="right").astype(np.int64)
        # Rounding may reach the end of the last interval: the last example that has a weight.
        return np.minimum(drawn, int(np.flatnonzero(self.weights)[-1]))

    def of_rows(self, rows: Sequence[int]) -> Order:
        kept = self.weights[np.asarray(rows, dtype=np.int64)]
        return Weighted(kept if kept.sum() > 0 else np.ones(len(kept)))
