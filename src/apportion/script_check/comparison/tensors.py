"""The tensors of all ranks beside those of one process: which is which, by how much they differ, and how much of that
rounding explains, in float64 or as measured in the script's own precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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


# Which tensor of one process each rank's tensor is, or is a part of.
#
# Names are the same on ranks that hold the whole network. A rank that holds a part of it, such as a stage of a
# pipeline or slices made by hand, has names and shapes of its own; its tensors are found by the values that they begin
# with.


@dataclass(frozen=True)
class Place:
    """Where a rank's tensor lies in one process: in the tensor ``name``, whole, or from row ``start`` on in dimension
    ``dimension``. ``size``: the rows of a shard, which is filled with zeros where the tensor has no more."""

    name: str
    dimension: int | None = None
    start: int = 0
    size: int = 0

    def part_of(self, array: Array, like: Array | None) -> Array:
        """Returns the part of one process's tensor that a rank holds. ``like``: the rank's tensor."""
        if self.dimension is None or (like is None and not self.size):
            return array
        size = self.size if like is None else like.shape[self.dimension]
        index = [slice(None)] * array.ndim
        index[self.dimension] = slice(self.start, self.start + size)
        part = array[tuple(index)]
        filled = [(0, 0)] * array.ndim
        filled[self.dimension] = (0, self.size - part.shape[self.dimension] if self.size else 0)
        return np.pad(part, filled)


Places = Mapping[str, Place]


def placed(ranks: Sequence[RankRecord], union: RankRecord) -> list[Places]:
    """Returns for each rank where its tensors lie in one process; tensors that are found nowhere are left out."""
    reference, names = initial(union), _names_of_tied(union)
    found = list[Places]()
    for rank, record in enumerate(ranks):
        weights = initial(record)
        # Names count where they agree with values. Stages of a pipeline can have the names of one process, as each
        # begins to count at 0, for other tensors.
        parts = _whole(weights, reference)
        if parts is None:
            parts = {**_parts(rank, weights, reference, set(names.values())), **_runs(record, union)}
            parts = {own: replace(place, name=names.get(place.name, place.name)) for own, place in parts.items()}
        found.append({**parts, **_shards(rank, ranks, union)})
    return found


def _shards(rank: int, ranks: Sequence[RankRecord], union: RankRecord) -> dict[str, Place]:
    """The places of tensors of no network that an optimizer of each rank holds a shard of, as one does that updates its
    part of a flat vector of all weights: the shards of all ranks, in order, make up the tensor of one process."""
    begun, found = initial(ranks[rank]), dict[str, Place]()
    for step in ranks[rank].steps:
        reference = step_of(union, step["optimizer"], step["number"]) if step["number"] == 1 else None
        for name, array in step["weights"].items() if reference is not None else ():
            whole = reference["weights"].get(name)  # type: ignore[index]
            if whole is None or name in begun or whole.ndim != array.ndim:
                continue
            dimensions = [at for at in range(array.ndim) if array.shape[at] != whole.shape[at]]
            size = array.shape[dimensions[0]] if len(dimensions) == 1 else 0
            if size and -(-whole.shape[dimensions[0]] // len(ranks)) == size:
                found[name] = Place(name, dimensions[0], rank * size, size)
    return found


def _names_of_tied(union: RankRecord) -> dict[str, str]:
    """The further names of parameters of one process that have several, with those that its steps are recorded by."""
    names = dict[str, str]()
    for event in union.events_of("network"):
        if not event["step"]:
            added = dict(event.get("tied", {}))
            names = {further: added.get(name, name) for further, name in names.items()} | added
    return names


def _whole(weights: Mapping[str, Array], reference: Mapping[str, Array]) -> Places | None:
    """The places of a rank that holds the whole network: its names and shapes are those of one process."""
    same = set(weights) == set(reference) and all(weights[name].shape == reference[name].shape for name in weights)
    if not same or not _has_values(weights, reference):
        return None
    return {name: Place(name) for name in weights}


def _has_values(weights: Mapping[str, Array], reference: Mapping[str, Array]) -> bool:
    """Whether values do not contradict the names: no tensor begins with the values of one of another name, as those of
    a pipeline's stages do that are alike."""
    by_value = {_value(array): name for name, array in reference.items() if _varies(array)}
    for name, array in weights.items():
        other = by_value.get(_value(array))
        if other is not None and other != name and not np.array_equal(array, reference[name]):
            return False
    return True


def _runs(record: RankRecord, union: RankRecord) -> dict[str, Place]:
    """The places of the networks of a rank whose tensors begin, in order, with the values of a run of tensors of one
    process, as a stage of a pipeline does. Its zeros and ones are found by what lies between them. Stages of layers
    that are copies of each other begin alike, and are distinguished by their gradients."""
    reference = initial(union)
    tied = {_value(reference[name]) for name in _names_of_tied(union).values() if name in reference}
    order, values = list(reference), [_value(array) for array in reference.values()]
    found = dict[str, Place]()
    for event in record.events_of("network"):
        weights = {} if event["step"] else event["weights"]
        here = {name: array for name, array in weights.items() if _value(array) not in tied}  # tied ones lie elsewhere
        for part in (weights, here):
            wanted = [_value(array) for array in part.values()]
            ends = range(len(wanted), len(order) + 1) if wanted else ()
            runs = [order[end - len(wanted) : end] for end in ends if values[end - len(wanted) : end] == wanted]
            if runs:
                names = list(part)
                # Layers that are copies of each other begin with the same values in several places; only gradients
                # distinguish them.
                run = (
                    runs[0]
                    if len(runs) == 1
                    else min(runs, key=lambda each: _place_distance(names, each, record, union))
                )
                found |= {name: Place(other) for name, other in zip(names, run, strict=True)}
                break
    return found


def _place_distance(names: Sequence[str], others: Sequence[str], record: RankRecord, union: RankRecord) -> float:
    """How far the gradients of tensors of a rank lie from those of others of one process, over all steps."""
    distance = 0.0
    for step in record.steps:
        reference = step_of(union, step["optimizer"], step["number"])
        if reference is not None:
            pairs = [
                (step["gradients"].get(a), reference["gradients"].get(b)) for a, b in zip(names, others, strict=True)
            ]
            present = [(a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape]
            distance += sum(float(np.linalg.norm(a - b)) for a, b in present)
    return distance


def _parts(rank: int, weights: Mapping[str, Array], reference: Mapping[str, Array], tied: Collection[str]) -> Places:
    """The places of tensors by their values; those that do not vary lie where the nearest that vary say. A tied tensor
    lies where it is used first, and not among the tensors that come before and after it on a rank."""
    by_value = defaultdict[tuple[Any, ...], list[int]](list)
    order = list(reference)
    for at, name in enumerate(order):
        by_value[_value(reference[name])].append(at)
    found = dict[str, Place]()
    anchors = dict[int, int]()
    names = list(weights)
    for at, name in enumerate(names):
        if name in reference and np.array_equal(weights[name], reference[name]) and _varies(weights[name]):
            anchors[at] = order.index(name)
        elif len(candidates := by_value[_value(weights[name])]) == 1 and _varies(weights[name]):
            anchors[at] = candidates[0]
    beside = [at for at, place in anchors.items() if order[place] not in tied]
    for at, name in enumerate(names):
        if (candidates := by_value[_value(weights[name])]) and at not in anchors:
            nearest = min(beside, key=lambda each: abs(each - at), default=None)
            goal = at if nearest is None else anchors[nearest] + at - nearest
            found[name] = Place(order[min(candidates, key=lambda each: abs(each - goal))])
        elif at in anchors:
            found[name] = Place(order[anchors[at]])
        elif (place := _slice(rank, name, weights[name], reference)) is not None:
            found[name] = place
    return found


def _slice(rank: int, name: str, array: Array, reference: Mapping[str, Array]) -> Place | None:
    """Where a tensor is a slice of the one of its name, along the one dimension in which their shapes differ."""
    whole = reference.get(name)
    if whole is None or whole.ndim != array.ndim:
        return None
    dimensions = [at for at in range(array.ndim) if array.shape[at] != whole.shape[at]]
    if len(dimensions) != 1:
        return None
    size = array.shape[dimensions[0]]
    starts = [rank * size, *range(0, whole.shape[dimensions[0]] - size + 1, max(size, 1))]
    for start in starts:
        place = Place(name, dimensions[0], start)
        if np.array_equal(place.part_of(whole, array), array):
            return place
    return None


def _varies(array: Array) -> bool:
    """Whether a tensor's values distinguish it from others: constants do not."""
    return bool(array.size > 1 and np.ptp(array))


def _value(array: Array) -> tuple[Any, ...]:
    return (array.shape, array.tobytes())


def unplaced(ranks: Sequence[RankRecord], union: RankRecord) -> list[str]:
    """Returns the trained tensors of ranks that are not found in one process, as ``0.weight on rank 1``."""
    known = {name for step in union.steps for name in step["gradients"]}
    found = list[str]()
    for record, places in zip(ranks, placed(ranks, union), strict=True):
        begun = initial(record)
        trained = {name for step in record.steps for name in step["gradients"] if name in begun}
        for name in begun:
            if name in trained and (name not in places or places[name].name not in known):
                found.append(f"{name} on rank {record.rank}")
    return found
