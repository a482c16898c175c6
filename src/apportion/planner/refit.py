"""What trials teach about the predictions: one factor for what devices do, one for what links do.

Two numbers, whatever was tried: a handful of measurements carries no more. Both are pulled towards 1, so that what no
trial tells apart (nothing that was tried communicates) stays as it was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.pricing.cost import Cost

COMMUNICATING = ("communicating", "waiting")
"""The terms that the second factor is of; the others are the first's."""
PULL = 0.05
"""Towards 1: a factor of e costs as much as a prediction that misses by this much."""
MOST = 4.0
"""No factor is larger, or smaller than its inverse: what is further off is not a matter of a factor."""
GRID = 81


@dataclass(frozen=True)
class Correction:
    """How many times as long as predicted."""

    computing: float = 1.0
    communicating: float = 1.0

    def step_seconds(self, cost: Cost) -> float:
        """Of a prediction, corrected."""
        computing, communicating = divided(cost)
        return self.computing * computing + self.communicating * communicating


def divided(cost: Cost) -> tuple[float, float]:
    """(what devices do, what links do and who waits for whom) seconds of a step."""
    sent = sum(cost.terms.get(term, 0.0) for term in COMMUNICATING)
    return cost.step_seconds - sent, sent


def correction(tried: Sequence[tuple[Cost, float]]) -> Correction:
    """From (predicted, measured seconds a step) of what was tried: the pair of factors that leaves the smallest sum of
    absolute errors of the logarithms. Absolute ones: a candidate that is far off by itself does not move the others."""
    if not tried:
        return Correction()
    parts = np.array([divided(cost) for cost, _ in tried])
    logs = np.log(np.array([seconds for _, seconds in tried]))
    steps = np.linspace(-np.log(MOST), np.log(MOST), GRID)
    a, b = np.meshgrid(steps, steps, indexing="ij")
    predicted: Any = np.exp(a)[..., None] * parts[:, 0] + np.exp(b)[..., None] * parts[:, 1]
    errors = np.abs(np.log(np.maximum(predicted, 1e-12)) - logs).sum(-1) + PULL * (np.abs(a) + np.abs(b))
    best = np.unravel_index(int(np.argmin(errors)), errors.shape)
    return Correction(float(np.exp(a[best])), float(np.exp(b[best])))
