"""Corrections that trials teach about the predictions: factors for what devices do, and for what strategies send.

::

    measured ~ a * (computing, updating, ...) + m * (communicating, waiting)      m = b, or a tried strategy's own

All that was tried computes, so one factor ``a`` is learnt from all of it. What strategies send differs in kind: pages
that all write, sums, messages from one to the next. That data_parallel waits longer than it should says little about
tensor_parallel: the ``b`` of those that were not tried moves only by as much as two strategies agree on, and what a
single one shows stays its own. All are pulled towards 1, so what no trial tells apart stays as it was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from apportion.cost_model.cost import Cost

COMMUNICATING = ("communicating", "waiting")
"""The terms of a cost that the factor ``m`` applies to; the factor ``a`` applies to the others."""
PULL, COMMON_PULL = 0.05, 0.075
"""The strengths of the pulls: the first of ``a`` towards 1 and of a strategy's ``m`` towards ``b``; the second of ``b``
towards 1. A factor of e costs as much as a prediction that misses by this much. The second is more than one of the
first, and less than two, so it takes two strategies to move ``b``."""
MOST = 4.0
"""The largest factor, whose inverse is the smallest: a prediction that is further off is not a matter of a factor."""
GRID = 81


class Trial(NamedTuple):
    """A trial of a strategy: what was predicted and what was measured."""

    strategy: str
    """The name of the strategy, without parameters."""
    predicted: Cost
    seconds: float
    """The measured seconds of a step."""


@dataclass(frozen=True)
class Correction:
    """The factors that say how many times as long as predicted something takes."""

    computing: float = 1.0
    communicating: float = 1.0
    """The factor on communicating and waiting of strategies that were not tried."""
    own: Mapping[str, float] = field(default_factory=dict)
    """The factors on communicating and waiting of the strategies that were tried, by name."""

    def step_seconds(self, strategy: str, cost: Cost) -> float:
        """Return the predicted seconds of a step, corrected by the factors."""
        computing, communicating = divided(cost)
        return self.computing * computing + self.own.get(strategy, self.communicating) * communicating


def divided(cost: Cost) -> tuple[float, float]:
    """Divide the seconds of a step into (what devices do, what links do and ranks wait for each other)."""
    sent = sum(cost.terms.get(term, 0.0) for term in COMMUNICATING)
    return cost.step_seconds - sent, sent


def correction(tried: Sequence[Trial]) -> Correction:
    """Fit the factors that leave the smallest sum of pulls and of absolute errors of the logarithms. The errors are
    absolute, so that a candidate that is far off by itself does not move the others, and factors are either equal or
    not."""
    if not tried:
        return Correction()
    steps = np.linspace(-np.log(MOST), np.log(MOST), GRID)
    apart = PULL * np.abs(steps[:, None] - steps)  # [b, m]
    total = PULL * np.abs(steps)[:, None] + COMMON_PULL * np.abs(steps)  # [a, b]
    chosen: dict[str, Any] = {}
    for strategy in dict.fromkeys(t.strategy for t in tried):
        each = _errors([t for t in tried if t.strategy == strategy], steps)[:, None, :] + apart  # [a, b, m]
        chosen[strategy] = each.argmin(-1)
        total += each.min(-1)
    a, b = np.unravel_index(int(np.argmin(total)), total.shape)
    factors = np.exp(steps)
    sends = {t.strategy for t in tried if divided(t.predicted)[1] > 0}
    own = {strategy: float(factors[m[a, b]]) for strategy, m in chosen.items() if strategy in sends}
    return Correction(float(factors[a]), float(factors[b]), own)


def _errors(tried: Sequence[Trial], steps: Any) -> Any:
    """Sum the absolute errors of the logarithms over trials of one strategy, for each pair of the logarithms of (a,
    m)."""
    parts = np.array([divided(t.predicted) for t in tried])
    logs = np.log(np.array([t.seconds for t in tried]))
    a, m = np.exp(steps)[:, None, None], np.exp(steps)[:, None]
    predicted: Any = a * parts[:, 0] + m * parts[:, 1]
    return np.abs(np.log(np.maximum(predicted, 1e-12)) - logs).sum(-1)
