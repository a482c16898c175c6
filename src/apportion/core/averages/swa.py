"""swa: the mean of the weights over the later updates.

Paper: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.

    until update ``start``: a_t = w_t;  then a_t = a_(t-1) + (w_t - a_(t-1)) / (t - start)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from apportion.core.average import SLOT, WeightAverage

COUNT = "average_count"


@final
@dataclass(frozen=True, repr=False)
class Swa(WeightAverage):
    """The mean of the weights after each update later than ``start``; until then, the weights."""

    positional: ClassVar[tuple[str, ...]] = ("start",)

    start: int = 0
    """The number of updates that are left out."""

    def __post_init__(self) -> None:
        self._must_be_whole("start", least=0, unit="updates")

    def update(self, slots: dict[str, Any], weights: Tensor) -> None:
        average, count = slots.get(SLOT), slots.setdefault(COUNT, torch.zeros(()))
        count += 1
        taken = int(count) - self.start
        if average is None:
            slots[SLOT] = weights.clone()
        elif taken <= 1:
            average.copy_(weights)
        else:
            average.lerp_(weights, 1.0 / taken)
