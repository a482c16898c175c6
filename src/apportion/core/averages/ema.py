"""ema: the exponential moving average of the weights.

Papers: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Tarvainen and Valpola, "Mean
teachers are better role models", 2017.

    a_1 = w_1;  a_t = decay a_(t-1) + (1 - decay) w_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from apportion.core.average import SLOT, WeightAverage


@final
@dataclass(frozen=True, repr=False)
class Ema(WeightAverage):
    """``a = decay a + (1 - decay) w`` after each update, begun with the weights after the first."""

    positional: ClassVar[tuple[str, ...]] = ("decay",)

    decay: float = 0.999
    """What is kept of the average at an update, at least 0 and below 1."""

    def __post_init__(self) -> None:
        if not isinstance(self.decay, int | float) or isinstance(self.decay, bool) or not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r} must be at least 0 and below 1, as ema(0.999)")

    def update(self, slots: dict[str, Any], weights: Tensor) -> None:
        average = slots.get(SLOT)
        if average is None:
            slots[SLOT] = weights.clone()
        else:
            average.lerp_(weights, 1.0 - self.decay)
