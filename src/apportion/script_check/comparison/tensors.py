"""The tensors of all ranks beside those of one process: which is which, by how much they differ, and how much of that
rounding explains, in float64 or as measured in the script's own precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.script_check.record import Event, RankRecord

Array = np.ndarray[Any, Any]
RELATIVE = 1e-9
"""What rounding in float64 may change of a tensor, relative to its norm."""
FLOOR = 1e-12
"""The same, relative to the norm of all tensors: a gradient that is zero but for rounding has no relative error."""


@dataclass(frozen=True)
class Bounds:
    """What rounding may change. ``relative``: of a tensor, relative to its norm; ``floor``: relative to the norm of all
    tensors."""

    relative: float = RELATIVE
    floor: float = FLOOR


IN_FLOAT64 = Bounds()
StepBounds = Mapping[tuple[int, int], Bounds] | None
"""The bounds of each step that can be compared, by optimizer and number; None for those of float64 at all steps."""


@dataclass(frozen=True)
class TensorDifference:
    """How one rank's tensor differs from the same tensor of one process.

    ``relative``: the norm of the difference over the norm of the reference; ``ratio``: the factor of the reference
    that fits best; ``cosine``: of the angle between the two; ``rounding``: what rounding may change, relative to the
    norm.
    """

    name: str
    rank: int
    relative: float
    ratio: float
    cosine: float
    rounding: float = RELATIVE

    @property
    def scaled(self) -> bool:
        """Whether the tensor is a multiple of the reference, and nothing else."""
        # The cosine of the angle between two nearly parallel vectors differs from 1 by half of the square of the angle.
        return self.cosine > 1 - max(1e-9, self.rounding**2)


def difference(
    name: str, rank: int, found: Array | None, reference: Array | None, scale: float, bounds: Bounds = IN_FLOAT64
) -> TensorDifference | None:
    """Returns how a tensor differs from its reference; None where rounding explains it. No gradient counts as zero.
    ``scale``: the norm of all tensors together."""
    if found is None and reference is None:
        return None
    if found is None or reference is None:
        shape = (found if found is not None else reference).shape  # type: ignore[union-attr]
        found = np.zeros(shape) if found is None else found
        reference = np.zeros(shape) if reference is None else reference
    if found.shape != reference.shape:
        return TensorDifference(name, rank, float("inf"), float("nan"), float("nan"))
    a, b = found.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None if np.array_equal(a, b, equal_nan=True) else TensorDifference(name, rank, float("inf"), 0.0, 0.0)
    distance, norm, other = (float(np.linalg.norm(each)) for each in (a - b, b, a))
    # The second term is for a tensor that is zero but for rounding: what rounding leaves there is relative to the other
    # tensors from which it was computed.
    if distance <= bounds.relative * norm + bounds.floor * scale:
        return None
    product = float(a @ b)
    cosine = product / (norm * other) if norm and other else 0.0
    relative, ratio = (distance / norm, product / norm**2) if norm else (float("inf"), 0.0)
    return TensorDifference(name, rank, relative, ratio, cosine, bounds.relative)


def scale_of(arrays: Mapping[str, Array | None]) -> float:
    """Returns the norm of all tensors together."""
    return float(np.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in arrays.values() if a is not None)))


def initial(record: RankRecord) -> dict[str, Array]:
    """Returns the parameters and buffers of a rank before its first step, by name."""
    return {
        name: array
        for event in record.events_of("network")
        if not event["step"]
        for name, array in event["weights"].items()
    }


def step_of(record: RankRecord, optimizer: int, number: int) -> Event | None:
    """Returns the n-th step of an optimizer on a rank, from 1; None where it has not made it."""
    return next((s for s in record.steps if s["optimizer"] == optimizer and s["number"] == number), None)


def events_before_step(record: RankRecord, optimizer: int, number: int, *kinds: str) -> list[Event]:
    """Returns a rank's events of some kinds between a step of an optimizer and the one before it."""
    step, before = step_of(record, optimizer, number), step_of(record, optimizer, number - 1)
    first = 0 if before is None else before["step"]
    return (
        [] if step is None else [event for event in record.events_of(*kinds) if first <= event["step"] < step["step"]]
    )


def contributions_of(record: RankRecord, optimizer: int, number: int) -> Event | None:
    """Returns the event on what backward added to the gradients before a step of an optimizer; None where there is
    none."""
    events = record.events_of("contributions")
    return next((e for e in events if (e["optimizer"], e["number"]) == (optimizer, number)), None)


def places(record: RankRecord) -> list[tuple[int, int]]:
    """Returns the steps of a rank, in order, each as the number of the optimizer and of its step."""
    return [(step["optimizer"], step["number"]) for step in record.steps]


def shown(name: str, names: Sequence[str]) -> str:
    """Returns a name as it is printed: without the variable that holds the network, where all names have the same."""
    first = {each.partition(".")[0] for each in names}
    return name.partition(".")[2] or name if len(first) == 1 else name


def listed(names: Sequence[str]) -> str:
    """Returns at most four names as a sentence lists them, such as ``a, b and c``."""
    parts = [*names[:4], "others"] if len(names) > 4 else list(names)
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def ranks_listed(ranks: Sequence[int]) -> str:
    """Returns ranks as a sentence lists them, such as ``ranks 0 and 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + listed(list(map(str, ranks)))


NOISE_FACTOR = 8.0
"""The multiple of the measured noise that rounding alone does not reach."""
LEAST_NOISE = {"float64": 1e-9, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""The relative rounding of gradients in each element type, below which no measurement of a single order goes: one
process rounds a sum over all rows once, and each rank the sum over its own."""
MOST_NOISE = 0.1
"""The noise from which on a step is not compared: it hides what a mistake changes."""


def measured_bounds(union: RankRecord, reordered: RankRecord) -> dict[tuple[int, int], Bounds]:
    """Returns the bounds of the steps that can be compared, by optimizer and number, from two runs of one process that
    differ by the order of the rows in each batch."""
    found = dict[tuple[int, int], Bounds]()
    types = [event["type"] for event in union.events_of("precision")] or ["float32"]
    least = max(LEAST_NOISE.get(each, 0.0) for each in types)
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
                    floor = max(floor, NOISE_FACTOR * distance / scale)
                    # A tensor that is nearly zero has a large relative error; it counts towards the floor alone.
                    relative = max(relative, NOISE_FACTOR * distance / norm if distance > least * scale else 0.0)
        if max(relative, floor) > MOST_NOISE:
            break
        found[optimizer, number] = Bounds(relative, floor)
    return found


def _distance(array: Array, other: Array) -> tuple[float, float]:
    return float(np.linalg.norm((array - other).ravel())), float(np.linalg.norm(array.ravel())) or 1.0
