"""What a proof has found: the largest difference of two states, what rounding allows, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FLOOR = 1e-10
"""Differences below this are rounding in float64, whatever the noise measured."""
NOISE_FACTOR = 100.0
CAP = 1e-3
"""No difference above this is called equal, however much rounding is amplified: a mistake might hide in it."""

Verdict = Literal["equal", "different", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one tensor over all steps."""

    name: str
    """``model/...``, ``optimizer/...`` or ``carry/...``."""
    step: int
    """Of all steps, the one where it is largest (the first is 1)."""
    absolute: float
    relative: float
    """To the largest value in the reference's tensor (at least 1): what the bound is for."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The proof in one precision."""

    precision: str
    steps: int
    tensors: int
    worst: Difference
    noise: float
    """The same measure between two runs of the reference, one of them with every weight and gradient moved by a
    rounding; without bound where the reference comes to be no number."""
    bound: float
    disagreement: str | None
    """A rank whose state is not rank 0's, and when."""
    verdict: Verdict
    """``undecided``: above what may be called equal, within 100 times the noise."""

    @property
    def holds(self) -> bool:
        return self.verdict == "equal"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What ``check`` found."""

    strategy: str
    workers: int
    exact: bool
    """Is the reference the one-device step, or the strategy's own (an approximate one)?"""
    rounds: tuple[Round, ...]
    by_design: tuple[str, ...]
    """What differs by design, or could not be checked, in words."""

    @property
    def holds(self) -> bool:
        """Is it the same network? The first round has to show it; the run's own precision may leave it open."""
        return self.rounds[0].holds and all(r.verdict != "different" for r in self.rounds)


def verdict_of(difference: float, noise: float, bound: float) -> Verdict:
    if noise == float("inf"):
        return "undecided"
    if difference <= bound:
        return "equal"
    return "different" if difference > NOISE_FACTOR * noise else "undecided"


def largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> Difference:
    """The tensor that differs most, relative to its largest value; a missing or foreign one differs without bound."""
    for name in sorted(found.keys() ^ expected.keys()):
        return Difference(name=name, step=step, absolute=float("inf"), relative=float("inf"))
    differences = (_difference(name, found[name], expected[name], step) for name in sorted(expected))
    return max(
        differences, key=lambda d: d.relative, default=Difference(name="nothing", step=step, absolute=0, relative=0)
    )


def _difference(name: str, found: Tensor, expected: Tensor, step: int) -> Difference:
    if found.shape != expected.shape:
        return Difference(name=name, step=step, absolute=float("inf"), relative=float("inf"))
    a, b = found.to(torch.float64), expected.to(torch.float64)
    if not b.numel():
        return Difference(name=name, step=step, absolute=0.0, relative=0.0)
    same = (a == b) | (a.isnan() & b.isnan())
    absolute = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max())
    scale = max(1.0, float(b.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
    return Difference(name=name, step=step, absolute=absolute, relative=absolute / scale)
