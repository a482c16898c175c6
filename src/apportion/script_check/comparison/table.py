"""Where the ranks and one process part: the first step at which a gradient or a weight differs, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apportion.script_check.comparison.tensors import (
    IN_FLOAT64,
    Array,
    Bounds,
    Difference,
    difference,
    matching,
    places,
    scale_of,
    step_of,
)
from apportion.script_check.record import RankRecord


@dataclass(frozen=True)
class Parting:
    """The first step at which something differs. ``what``: gradients before the step, or weights after it.
    ``differences``: of each rank's tensors from those of one process, under the names of the latter. ``compared``: the
    names of all tensors compared at that step."""

    optimizer: int
    step: int
    what: Literal["gradients", "weights"]
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    site: str

    def of(self, name: str) -> list[Difference]:
        """Returns the differences of one tensor, by rank."""
        return [each for each in self.differences if each.name == name]

    @property
    def names(self) -> list[str]:
        """The tensors that differ, in order."""
        return list(dict.fromkeys(each.name for each in self.differences))


def parting(
    ranks: Sequence[RankRecord], union: RankRecord, bounds: Mapping[tuple[int, int], Bounds] | None = None
) -> tuple[Parting | None, int]:
    """Returns where the ranks part from one process, None where they do not, and the number of steps compared.
    ``bounds``: of each step to compare, by optimizer and number; without them, those of float64."""
    names = matching(ranks, union)
    compared = 0
    for optimizer, number in places(union):
        reference = step_of(union, optimizer, number)
        steps = [step_of(record, optimizer, number) for record in ranks]
        if reference is None or not any(steps) or (bounds is not None and (optimizer, number) not in bounds):
            continue
        for what in ("gradients", "weights"):
            scale = scale_of(reference[what])
            found = list[Difference]()
            for rank, step in enumerate(steps):
                arrays: dict[str, Array | None] = {} if step is None else step[what]
                for name, array in arrays.items():
                    own = names[rank].get(name, name)
                    if own in reference[what]:
                        bound = IN_FLOAT64 if bounds is None else bounds[optimizer, number]
                        differs = difference(own, rank, array, reference[what][own], scale, bound)
                        found += [differs] if differs is not None else []
            if found:
                kind: Literal["gradients", "weights"] = "gradients" if what == "gradients" else "weights"
                return Parting(
                    optimizer, number, kind, tuple(found), tuple(reference[what]), reference["site"]
                ), compared
        compared += 1
    return None, compared
