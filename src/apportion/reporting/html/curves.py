"""Functions that reduce a hundred thousand values to what a picture can show, without losing what matters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apportion.reporting.html.history import Curve, Floats


def finite(curve: Curve) -> Curve:
    """Return the curve without the values that are not finite."""
    keep = np.isfinite(curve.y)
    return Curve(curve.x[keep], curve.y[keep])


def thinned(curve: Curve, buckets: int = 500) -> Curve:
    """Return the smallest and the largest value of each of so many stretches, in their order, so that no spike is lost.

    Values that are not finite stay as gaps.
    """
    if len(curve.x) <= 2 * buckets:
        return Curve(curve.x, np.where(np.isfinite(curve.y), curve.y, np.nan))
    kept: list[int] = []
    for part in np.array_split(np.arange(len(curve.x)), buckets):
        y = curve.y[part]
        bad = ~np.isfinite(y)
        picks = {int(part[np.argmax(bad)])} if bad.any() else set()
        if not bad.all():
            picks |= {int(part[np.argmin(np.where(bad, np.inf, y))]), int(part[np.argmax(np.where(bad, -np.inf, y))])}
        kept += sorted(picks)
    y = curve.y[kept]
    return Curve(curve.x[kept], np.where(np.isfinite(y), y, np.nan))


def smoothed(curve: Curve, points: int = 200) -> Curve:
    """Return the course of the finite values: means over stretches, then a weighted mean of the neighbouring ones."""
    curve = finite(curve)
    if len(curve.x) < 3:
        return curve
    parts = np.array_split(np.arange(len(curve.x)), min(points, len(curve.x)))
    starts = [int(part[0]) for part in parts]
    sizes = np.array([len(part) for part in parts], dtype=float)
    x = np.add.reduceat(curve.x, starts) / sizes
    return Curve(x, _weighted(np.add.reduceat(curve.y, starts) / sizes, reach=max(1, len(parts) // 40)))


def _weighted(y: Floats, reach: int) -> Floats:
    """Average each value with its neighbours, the near ones weighing more; at the ends with those that there are."""
    window = np.hanning(2 * reach + 3)[1:-1]
    return np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")


def spread(count: int, most: int) -> NDArray[np.intp]:
    """Return the indices of so many, or of ``most`` of them, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.intp))


def on_log_scale(curve: Curve) -> bool:
    """Report whether the course of positive values spans more than a factor of 30, so that a linear scale would hide
    its end."""
    y = finite(curve).y
    return len(y) > 2 and float(y.min()) > 0 and float(y.max()) / float(y.min()) > 30
