"""How much longer a step takes because everyone waits for the slowest: the expected largest of n.

Blom, "Statistical Estimates and Transformed Beta-Variables", 1958: the expected largest of n normal values is about the
(n - 0.375) / (n + 0.25) quantile.
"""

from __future__ import annotations

from statistics import NormalDist


def slowest(workers: int, spread: float) -> float:
    """Of so many workers whose times have this relative standard deviation: times this factor."""
    if workers < 2:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
