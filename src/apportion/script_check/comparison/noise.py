"""What rounding changes in a script that computes in its own precision, measured: the same rows in another order."""

from __future__ import annotations

import numpy as np

from apportion.script_check.comparison.tensors import Array, Bounds, places, scale_of, step_of
from apportion.script_check.record import RankRecord

FACTOR = 8.0
"""How far a difference exceeds the measured noise where it is none of it."""
LEAST = 1e-5
"""The relative rounding of float32, which no measurement of a single order goes below."""
MOST = 0.05
"""The noise from which on a step is not compared: it hides what a mistake changes."""


def measured_bounds(union: RankRecord, reordered: RankRecord) -> dict[tuple[int, int], Bounds]:
    """Returns the bounds of the steps that can be compared, by optimizer and number, from two runs of one process that
    differ by the order of the rows in each batch."""
    found = dict[tuple[int, int], Bounds]()
    for optimizer, number in places(union):
        first, second = step_of(union, optimizer, number), step_of(reordered, optimizer, number)
        if first is None or second is None:
            break
        relative, floor = LEAST, LEAST
        for what in ("gradients", "weights"):
            scale = scale_of(first[what]) or 1.0
            for name, array in first[what].items():
                other = second[what].get(name)
                if array is not None and other is not None:
                    distance, norm = _distance(array, other)
                    floor = max(floor, FACTOR * distance / scale)
                    relative = max(relative, FACTOR * distance / norm if distance > LEAST * scale else 0.0)
        if max(relative, floor) > MOST:
            break
        found[optimizer, number] = Bounds(relative, floor)
    return found


def _distance(array: Array, other: Array) -> tuple[float, float]:
    return float(np.linalg.norm((array - other).ravel())), float(np.linalg.norm(array.ravel())) or 1.0
