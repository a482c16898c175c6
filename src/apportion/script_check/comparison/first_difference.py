"""The first step at which a gradient or a weight of the ranks differs from that of one process, tensor by tensor.

Weights whose gradient is zero but for rounding are compared without their noise. The gradient of a bias before a
normalisation, or of the keys of an attention, is zero, and rounding leaves 1e-18 of it, which differs between the ranks
and one process. An optimizer that divides by the size of the gradient (Adagrad), or takes its sign alone, makes a step
of it that is far above rounding, and the network is the same: its outputs do not depend on these weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from apportion.script_check.comparison.tensors import (
    FLOOR,
    IN_FLOAT64,
    Array,
    Bounds,
    Place,
    Places,
    StepBounds,
    TensorDifference,
    difference,
    initial,
    placed,
    places,
    scale_of,
    step_of,
)
from apportion.script_check.record import RankRecord

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class ZeroGradients:
    """The gradients of all ranks and of one process that are zero but for rounding at every step."""

    ranks: Sequence[RankRecord]
    union: RankRecord

    def masked(self, rank: int, own: str, place: Place, weight: Array, part: Array) -> tuple[Array, Array]:
        """Returns a rank's weight and its counterpart in one process with zeros at the elements whose gradients are
        zero but for rounding on both. ``own``: the rank's name of the weight. A gradient that is exactly zero at all
        steps is left as it is, as rounding has left nothing in it."""
        small, other = self._small(rank, own), self._small(-1, place.name)
        if small is None or other is None:
            return weight, part
        (found, some), (here, there) = small, (place.part_of(mask, weight) for mask in other)
        if not found.shape == here.shape == weight.shape == part.shape:
            return weight, part
        # Only where rounding has left something: an element without any gradient must have the same weight on both
        # sides.
        noise = found & here & (some | there)
        return np.where(noise, 0.0, weight), np.where(noise, 0.0, part)

    @cached_property
    def _scales(self) -> dict[tuple[int, int], float]:
        """The norms of all gradients of one process, by optimizer and step: a rank may hold a few of them only."""
        return {(step["optimizer"], step["number"]): scale_of(step["gradients"]) for step in self.union.steps}

    def _small(self, at: int, name: str) -> tuple[Mask, Mask] | None:
        """Where the gradients of a tensor are at all steps below what rounding may change, and where one is not zero.
        ``at``: the rank, or -1 for one process. Returns None for a tensor without a gradient."""
        found = [
            (gradient, self._scales.get((step["optimizer"], step["number"]), 0.0))
            for step in (*self.ranks, self.union)[at].steps
            if (gradient := step["gradients"].get(name)) is not None
        ]
        if len({gradient.shape for gradient, _ in found}) != 1:
            return None
        small: Mask = np.logical_and.reduce([np.abs(gradient) <= FLOOR * scale for gradient, scale in found])
        some: Mask = np.logical_or.reduce([gradient != 0 for gradient, _ in found])
        return small, some


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which something differs. ``what``: gradients before the step, or weights after it.
    ``differences``: of each rank's tensors from those of one process, under the names of the latter. ``compared``: the
    names of all tensors compared at that step. ``shown``: the step as it is printed, after those of optimizers that had
    made their last one before, as an optimizer from before a restart has."""

    optimizer: int
    step: int
    what: Literal["gradients", "weights"]
    differences: tuple[TensorDifference, ...]
    compared: tuple[str, ...]
    site: str
    shown: int

    def differences_of(self, name: str) -> list[TensorDifference]:
        """Returns the differences of one tensor, by rank."""
        return [each for each in self.differences if each.name == name]

    @property
    def names(self) -> list[str]:
        """The tensors that differ, in order."""
        return list(dict.fromkeys(each.name for each in self.differences))


def first_difference(
    ranks: Sequence[RankRecord], union: RankRecord, bounds: StepBounds = None
) -> tuple[FirstDifference | None, int]:
    """Returns where the ranks first differ from one process, None where they do not, and the number of steps compared.
    ``bounds``: of each step to compare, by optimizer and number; without them, those of float64."""
    names = placed(ranks, union)
    initial_weights, zeros = [initial(record) for record in ranks], ZeroGradients(ranks, union)
    compared = 0
    for optimizer, number in places(union):
        reference = step_of(union, optimizer, number)
        steps = [step_of(record, optimizer, number) for record in ranks]
        if reference is None or not any(steps) or (bounds is not None and (optimizer, number) not in bounds):
            continue
        for what in ("gradients", "weights"):
            scale = scale_of(reference[what])
            found = list[TensorDifference]()
            for rank, step in enumerate(steps):
                arrays: dict[str, Array | None] = {} if step is None else step[what]
                bound = IN_FLOAT64 if bounds is None else bounds[optimizer, number]
                for pair in compared_pairs(arrays, reference[what], names[rank], initial_weights[rank]):
                    differs = pair.difference(rank, scale, bound, zeros if what == "weights" else None)
                    found += [differs] if differs is not None else []
            if found:
                kind: Literal["gradients", "weights"] = "gradients" if what == "gradients" else "weights"
                return FirstDifference(
                    optimizer,
                    number,
                    kind,
                    tuple(found),
                    tuple(reference[what]),
                    reference["site"],
                    number + _before(union, optimizer),
                ), compared
        compared += 1
    return None, compared


class ComparedPair(NamedTuple):
    """A rank's array and its counterpart in one process. ``own``: the rank's name of the array."""

    own: str
    place: Place
    array: Array | None
    part: Array | None

    def difference(
        self, rank: int, scale: float, bounds: Bounds, zeros: ZeroGradients | None = None
    ) -> TensorDifference | None:
        """Returns how the two differ; None where rounding explains it. ``zeros``: for weights, the gradients that are
        zero but for rounding, of which optimizers may make steps that differ."""
        name, array, part = self.place.name, self.array, self.part
        found = difference(name, rank, array, part, scale, bounds)
        if found is None or zeros is None or array is None or part is None:
            return found
        return difference(name, rank, *zeros.masked(rank, self.own, self.place, array, part), scale, bounds)


def compared_pairs(
    arrays: Mapping[str, Array | None],
    reference: Mapping[str, Array | None],
    names: Places,
    initial_weights: Mapping[str, Array],
) -> Iterator[ComparedPair]:
    """Yields each array of a rank with its counterpart in one process. ``names``: the rank's places;
    ``initial_weights``: the values that its tensors had before the first step."""
    for name, array in arrays.items():
        place = names.get(name) or (None if name in initial_weights else Place(name))
        if place is not None and place.name in reference:
            whole = reference[place.name]
            yield ComparedPair(
                name, place, array, None if whole is None else place.part_of(whole, initial_weights.get(name))
            )


def _before(record: RankRecord, optimizer: int) -> int:
    """The number of steps of all optimizers that had made their last step before this one made its first."""
    first = min(step["step"] for step in record.steps if step["optimizer"] == optimizer)
    others = {step["optimizer"]: step for step in record.steps if step["optimizer"] != optimizer}
    return sum(last["number"] for last in others.values() if last["step"] < first)
