"""Weights whose gradient is zero but for rounding, which some optimizers turn into steps of their own.

The gradient of a bias before a normalisation, or of the keys of an attention, is zero, and rounding leaves 1e-18 of it,
which differs between the ranks and one process. An optimizer that divides by the size of the gradient (Adagrad), or
takes its sign alone, makes a step of it that is far above rounding, and the network is the same: its outputs do not
depend on these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from apportion.script_check.comparison.places import Place
from apportion.script_check.comparison.tensors import FLOOR, Array, scale_of
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
