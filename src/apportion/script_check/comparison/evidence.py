"""What is known of the step at which the ranks and one process diverge, under the names of tensors in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from apportion.script_check.comparison.combination import Combination, combination, proportional
from apportion.script_check.comparison.first_difference import FirstDifference
from apportion.script_check.comparison.tensors import (
    IN_FLOAT64,
    RELATIVE,
    Array,
    Bounds,
    Places,
    contributions_of,
    events_before_step,
    placed,
    shown,
    step_of,
)
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_T = TypeVar("_T")


@dataclass(frozen=True)
class Evidence:
    """The first difference, and the records. ``split``: that of the pass that looked for modules that mix rows, where
    it was run; ``bounds``: what rounding may change at the step of the difference."""

    found: FirstDifference
    ranks: Sequence[RankRecord]
    union: RankRecord
    split: RankRecord | None = None
    bounds: Bounds = IN_FLOAT64

    def near(self, value: float, other: float, relative: float = RELATIVE) -> bool:
        """Whether two factors differ by no more than rounding may change, and by ``relative`` at most in float64."""
        return bool(np.isclose(value, other, rtol=max(relative, self.bounds.relative), atol=0.0))

    @cached_property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def is_sharded(self) -> bool:
        """Whether a network of rank 0 is sharded by fully_shard."""
        networks = self.ranks[0].events_of("network")
        return any(kind.startswith("FSDP") for event in networks for kind in event["modules"].values())

    @cached_property
    def steps(self) -> list[Event | None]:
        """The step of each rank."""
        return [step_of(record, self.found.optimizer, self.found.step) for record in self.ranks]

    @cached_property
    def places(self) -> list[Places]:
        """Where the tensors of each rank lie in one process."""
        return placed(self.ranks, self.union)

    @cached_property
    def names(self) -> list[dict[str, str]]:
        """The names of each rank's tensors that are whole ones of one process, with the names there."""
        return [{own: place.name for own, place in each.items() if place.dimension is None} for each in self.places]

    @cached_property
    def sliced(self) -> set[str]:
        """The tensors of one process of which ranks hold slices that were made by hand."""
        return {place.name for each in self.places for place in each.values() if place.dimension is not None}

    @cached_property
    def reference(self) -> dict[str, Array]:
        """The gradients of one process."""
        step = step_of(self.union, self.found.optimizer, self.found.step)
        return {} if step is None else _present(step["gradients"])

    @cached_property
    def gradients(self) -> list[dict[str, Array]]:
        """The gradients that the optimizer of each rank was given."""
        return [
            {} if step is None else self._named(rank, _present(step["gradients"]))
            for rank, step in enumerate(self.steps)
        ]

    @cached_property
    def own_gradients(self) -> list[dict[str, Array]]:
        """What the backward of each rank has added to each gradient, before any average; tensors of which that is not
        known, such as sharded ones, are left out."""
        return [
            self._named(rank, own_sum(record, self.found.optimizer, self.found.step))
            for rank, record in enumerate(self.ranks)
        ]

    @cached_property
    def weights_of_ranks(self) -> Combination:
        """How the gradients of all ranks together are made of the ranks' own ones; those of rank 0 stand for all."""
        return combination(self._whole(self.gradients[0]), self.own_gradients, self.bounds.relative)

    @cached_property
    def weights_in_reference(self) -> Combination:
        """How the gradients of one process are made of the ranks' own ones."""
        return combination(self._whole(self.reference), self.own_gradients, self.bounds.relative)

    @cached_property
    def micro_batches(self) -> list[list[dict[str, Array]]]:
        """What each backward of each rank has added to each gradient, in order; empty where the ranks do not all call
        backward equally often for all tensors, or once alone."""
        found = list[list[dict[str, Array]]]()
        for rank, record in enumerate(self.ranks):
            own = self._named(rank, own_parts(record, self.found.optimizer, self.found.step))
            counts = {len(parts) for parts in own.values()}
            if len(counts) != 1 or counts == {1}:
                return []
            found.append([{name: parts[at] for name, parts in own.items()} for at in range(counts.pop())])
        return found if len({len(each) for each in found}) == 1 else []

    @cached_property
    def micro_batches_of_ranks(self) -> Combination:
        """How the gradients of all ranks are made of the micro-batches of rank 0, then those of rank 1, and so on."""
        return combination(self._whole(self.gradients[0]), [part for parts in self.micro_batches for part in parts])

    @cached_property
    def micro_batches_in_reference(self) -> Combination:
        """How the gradients of one process are made of the ranks' micro-batches, in the same order."""
        return combination(self._whole(self.reference), [part for parts in self.micro_batches for part in parts])

    def _named(self, rank: int, arrays: Mapping[str, _T]) -> dict[str, _T]:
        """A rank's whole tensors under the names of one process."""
        names = self.names[rank]
        known = self.places[rank]
        return {names.get(name, name): a for name, a in arrays.items() if name in names or name not in known}

    def _whole(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        shapes = [{name: array.shape for name, array in own.items()} for own in self.own_gradients]
        return {n: a for n, a in arrays.items() if any(shape.get(n) == a.shape for shape in shapes)}

    @cached_property
    def unaveraged(self) -> list[str]:
        """The tensors whose gradient is on every rank a multiple of what this rank alone has computed."""
        return [name for name in self.found.compared if self._is_unaveraged(name)]

    def _is_unaveraged(self, name: str) -> bool:
        own = [each.get(name) for each in self.own_gradients]
        given = [each.get(name) for each in self.gradients]
        pairs = [(a, b) for a, b in zip(given, own, strict=True) if a is not None and b is not None]
        if len(pairs) < 2 or any(proportional(a, b, self.bounds.relative) is None for a, b in pairs):
            return False
        if any(a is not None and b is None for a, b in zip(given, own, strict=True)):
            return False
        return any(not self._alike(own, pairs[0][1]) for _, own in pairs[1:])

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks have the same gradients."""
        first = self.gradients[0]
        return all(
            set(each) == set(first) and all(self._alike(each[name], first[name]) for name in first)
            for each in self.gradients[1:]
        )

    def rounded(self, factor: float) -> float:
        """Returns a factor without the digits that rounding may change."""
        return round(factor, max(1, int(-np.log10(self.bounds.relative)) - 1))

    def _alike(self, a: Array, b: Array) -> bool:
        most = self.bounds.relative * float(np.linalg.norm(b)) + 1e-15
        return a.shape == b.shape and float(np.linalg.norm(a - b)) <= most

    def shown(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns names as they are printed."""
        return tuple(shown(name, self.found.compared) for name in names)

    def finding(  # noqa: PLR0913 (the fields of a finding)
        self,
        name: str,
        sentence: str,
        remedy: str,
        *,
        tensors: tuple[str, ...] | None = None,
        ranks: tuple[int, ...] = (),
        site: str | None = None,
        factor: float | None = None,
    ) -> Finding:
        """Returns a finding about the difference. ``tensors``: as they are printed, all that differ where they are left
        out; ``site``: the line of the step where it is left out."""
        tensors = self.shown(self.found.names) if tensors is None else tensors
        site = self.found.site if site is None else site
        return Finding(name, "difference", sentence, remedy, tensors, ranks, self.found.shown, site, factor)

    def window(self, rank: RankRecord, *kinds: str) -> list[Event]:
        """Returns a rank's events of some kinds between the step before this one and this one."""
        return events_before_step(rank, self.found.optimizer, self.found.step, *kinds)


def own_sum(record: RankRecord, optimizer: int, number: int) -> dict[str, Array]:
    """Returns what a rank's backward has added to each gradient before a step of an optimizer."""
    return {name: np.sum(parts, axis=0) for name, parts in own_parts(record, optimizer, number).items()}


def own_parts(record: RankRecord, optimizer: int, number: int) -> dict[str, list[Array]]:
    """Returns what each call of backward on a rank has added to each gradient before a step of an optimizer."""
    event = contributions_of(record, optimizer, number)
    return {} if event is None else {name: list(arrays) for name, arrays in event["own"].items() if arrays}


def _present(arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if array is not None}
