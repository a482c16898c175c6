"""What rounding changes in a script that computes in its own precision, measured: the same rows in another order."""

from __future__ import annotations

import numpy as np

from apportion.script_check.comparison.tensors import Array, Bounds, places, scale_of, step_of
from apportion.script_check.record import RankRecord

FACTOR = 8.0
"""The multiple of the measured noise that rounding alone does not reach."""
LEAST = {"float64": 1e-9, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""The relative rounding of gradients in each element type, below which no measurement of a single order goes: one
process rounds a sum over all rows once, and each rank the sum over its own."""
MOST = 0.1
"""The noise from which on a step is not compared: it hides what a mistake changes."""


def measured_bounds(union: RankRecord, reordered: RankRecord) -> dict[tuple[int, int], Bounds]:
    """Returns the bounds of the steps that can be compared, by optimizer and number, from two runs of one process that
    differ by the order of the rows in each batch."""
    found = dict[tuple[int, int], Bounds]()
    least = max((LEAST.get(event["type"], 0.0) for event in union.events_of("precision")), default=LEAST["float32"])
    for optimizer, number in places(union):
        first, second = step_of(union, optimizer, number), step_of(reordered, optimizer, number)
        if first is None or second is None:
            break
        relative, floor = least, least
        for what in ("gradients", "weights"):
            scale = scale_of(first[what]) or 1.0
            for name, array in first[what].items():
                other = second[what].get(name)
                if array is not None and other is not None:
                    distance, norm = _distance(array, other)
                    floor = max(floor, FACTOR * distance / scale)
                    relative = max(relative, FACTOR * distance / norm if distance > least * scale else 0.0)
        if max(relative, floor) > MOST:
            break
        found[optimizer, number] = Bounds(relative, floor)
    return found


def _distance(array: Array, other: Array) -> tuple[float, float]:
    return float(np.linalg.norm((array - other).ravel())), float(np.linalg.norm(array.ravel())) or 1.0
